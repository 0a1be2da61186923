"""Lesson 08: answers to its exercises, wrong and right."""

from __future__ import annotations

from tests.lessons.tables import Table, within

LOOP = """
def pack(sizes, first, cap):
    out, now, limit = [], [], first
    for i in {order}:
        now.append({keep})
        if sum({held}) {full} limit:
            out.append(now); now, limit = [], {then}
    {rest}
    return out
"""
PARTS = {
    "order": "reversed(range(len(sizes)))", "keep": "i", "held": "sizes[k] for k in now", "full": ">=", "then": "cap",
    "rest": "out += [now] if now else []",
}  # fmt: skip


def loop(**changed: str) -> str:
    return LOOP.format(**{**PARTS, **changed})


NEVER_OVER = """
def pack(sizes, first, cap):
    out, now, held, limit = [], [], 0, first
    for i in reversed(range(len(sizes))):
        if now and held + sizes[i] > limit:
            out.append(now); now, held, limit = [], 0, cap
        now.append(i); held += sizes[i]
    return out + [now]
"""
NEVER_RESET = """
def pack(sizes, first, cap):
    out, now, held, limit = [], [], 0, first
    for i in reversed(range(len(sizes))):
        now.append(i); held += sizes[i]
        if held >= limit:
            out.append(now); now, limit = [], cap
    return out + ([now] if now else [])
"""
RECURSIVE = """
def pack(sizes, first, cap):
    held, i = 0, len(sizes)
    while i and held < first:
        i -= 1
        held += sizes[i]
    return [list(range(len(sizes)))[:i - 1 if i else None:-1]] + (pack(sizes[:i], cap, cap) if i else [])
"""
GENERATOR = """
def pack(sizes, first, cap):
    limits, out, held = [first], [[]], 0
    for i, n in list(enumerate(sizes))[::-1]:
        if held >= (first if len(out) == 1 else cap):
            out.append([]); held = 0
        out[-1].append(i); held += n
    return tuple(tuple(b) for b in out)
"""
PACK = Table("pack", within("def pack(sizes, first, cap):\n    ..."), wrong={
    loop(order="range(len(sizes))"): "the gradient of the last parameter comes first",
    NEVER_OVER: "that gradient may exceed it",
    loop(full=">"): "holds exactly its limit is full",
    loop(then="first"): "from the second bucket on it is cap",
    loop().replace("[], [], first", "[], [], cap"): "the first bucket's limit is `first`",
    loop(rest=""): "is sent too, when backward is over",
    loop(rest="out += [now]"): "the last bucket is empty",
    NEVER_RESET: "reset the running sum to 0",
    loop(keep="len(sizes) - 1 - i").replace("sizes[k]", "sizes[len(sizes) - 1 - k]"):
        "counted in the reversed list",
    "return [[i] for i in range(len(sizes))][::-1]": "as if the limits were 0",
    "return [list(range(len(sizes)))[::-1]]": "one bucket for all gradients",
    loop(keep="sizes[i]", held="now"): "positions 0 to 3, each once; these are the sizes",
    loop().replace("now.append(i)", "now.insert(0, i)"): "within a bucket the gradient of the later",
    loop().replace("return out", "return out[::-1]"): "but in reverse order",
    loop(held="1 for k in now"): "this counts gradients; the limit applies",
    loop(held="now"): "this adds positions",
    loop(full="=="): "a bucket that exceeds its limit is full too: >=, not ==",
    loop(then="limit + cap"): "this adds cap to the limit with every bucket",
    NEVER_OVER.replace("now and ", ""): "these buckets never exceed their limit, and one may be",
    loop().replace("now, limit = [], cap", "limit = cap; now.clear()"): "create a new one with []",
    loop(order="range(len(sizes) - 1, 0, -1)"): "each once; position 0 is missing",
    "yield [0]": "got <generator object pack>; return a list of buckets",
    "return [[sizes.pop()] for _ in range(9)]": "pop from empty list",
}, right=[loop(), RECURSIVE, GENERATOR])  # fmt: skip

EXPOSED = Table("exposed", within("def exposed(end, spans):\n    return ..."), wrong={
    "sum(max(0, d - end) for s, d in spans)": "counted twice",
    "max(0, max(d for s, d in spans) - end)": "exposed(8, []) raised ValueError: max()",
    "end - max([end] + [d for s, d in spans])": "expected 6, got -6; the sign is reversed",
    "sum(d - end for s, d in spans)": "a time is never negative",
    "abs(max([d for s, d in spans] or [end]) - end)": "so nothing is exposed",
    "(max([end] + [d for s, d in spans]) - end) / sum(d - s for s, d in spans)": "return the time",
    "[d - end for s, d in spans]": "return a number",
}, right=[
    "float(max([end] + [d for s, d in spans]) - end)",
    "max([0] + [d - end for s, d in spans])",
    "len({t for s, d in spans for t in range(max(s, end), d)})",
])  # fmt: skip
