"""`%%ddp` cells → a program for torchrun: imports, functions and classes first, the rest in one `main()` under torch's
`@record`, which ends the process group.

In a notebook every name of a cell is global. Here those that a function outside `main` looks up are declared global
there, and all where names may be looked up by their text. A definition goes before `main` if nothing that it needs at
once is computed there. In a script a group can be made once. Under torchrun 2.13 the second `init_process_group` of a
process finds the addresses of the first and hangs. A pool's ranks meet afresh. Lines of IPython (`%magic`, `!command`,
`name?`) are left out with a comment. Pure: text, ast and tokenize.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from nbddp.capabilities.export import names
from nbddp.errors import BadInput
from nbddp.execution.cell_text import AROUND, dedented
from nbddp.launch.options import LaunchSpec, parse_cell

INIT, DESTROY, DISTRIBUTED = "init_process_group", "destroy_process_group", "torch.distributed"
RECORD = "from torch.distributed.elastic.multiprocessing.errors import record"
EARLY = ("environ", "path", "chdir", "filterwarnings", "putenv", "use")  # what an import behind it may depend on
INSTEAD = {"display": "write from IPython.display import display, or print,", "get_ipython": "remove it"}
RANK = 'int(os.environ["RANK"])'
MAGIC = re.compile(r"\s*(%|!|\?)|.*\?\s*$|\s*[\w.,\[\]'\" ]+=\s*[%!]")
TRANSPARENT = AROUND - {"%%timeit"}  # cell magics whose body is the program's
LEFT_OUT = "# left out: "
STRINGS = {"FSTRING_START": 1, "FSTRING_END": -1, "TSTRING_START": 1, "TSTRING_END": -1}


@dataclass(frozen=True)
class Statement:
    """A statement and its text as it stands in the cell, without its first line's indentation; `before`: the comment
    lines above it."""

    node: ast.stmt
    text: str
    before: str = ""


@dataclass(frozen=True)
class ExportedCell:
    """A `%%ddp` cell, as its label (`In[3]`), its line and its body say; or values that were pushed: `line` is None,
    and the body is the code that sets them, on `ranks`."""

    label: str
    line: str | None
    body: str
    ranks: tuple[int, ...] | None = None

    @property
    def spec(self) -> LaunchSpec:
        return LaunchSpec(ranks=self.ranks) if self.line is None else parse_cell(self.line)


@dataclass
class Parts:
    """What becomes of the cells. `main`: lines with their depth; `locals`: statements in it; `notes`: what to say."""

    imports: dict[str, None] = field(default_factory=dict)
    before: list[Statement] = field(default_factory=list)
    main: list[tuple[int, str]] = field(default_factory=list)
    inside: list[ast.stmt] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    group_of: str = ""


def program(cells: Sequence[ExportedCell], docstring: str) -> tuple[str, list[str]]:
    """The program's text, and a sentence for each thing that differs from the cells. docstring: what it says first.

    Raises BadInput if there is no cell, or for what a script cannot have.
    """
    if not any(cell.line is not None for cell in cells):
        raise BadInput("there is no %%ddp cell to export; run one first, or name the notebook's file")
    parsed = []
    parts = Parts()
    for cell in cells:
        text, gone = python(cell.body, cell.label)
        parts.notes += [f"{cell.label}: left out {line}" for line in gone]
        parsed.append((cell, *statements(text, cell.label)))
    every = [statement for _, own, _ in parsed for statement in own]
    parts.notes += [
        f"{name!r} is IPython's, and a script does not have it: "
        f"{INSTEAD.get(name, 'set a name of your own')} in the cell"
        for name in names.ipythons(s.node for s in every)
    ]
    movable = _movable(every, [s for cell, own, _ in parsed if cell.spec.ranks is None for s in own])
    several = len({cell.spec.argv for cell in cells if cell.line is not None}) > 1
    makers = _makers(every)
    for cell, own, rest in parsed:
        _add_cell(parts, cell, own, rest, movable, several, makers)
    return _text(parts, docstring), parts.notes


def _add_cell(
    parts: Parts,
    cell: ExportedCell,
    own: list[Statement],
    rest: str,
    movable: set[int],
    several: bool,
    makers: set[str],
) -> None:
    spec, early = cell.spec, False
    depth = 1 if spec.ranks is None else 2
    lines: list[tuple[int, str]] = []
    if several and cell.line is not None:
        parts.imports["import sys"] = None
        lines.append((depth, f"sys.argv[1:] = {list(spec.argv)!r}"))
    for statement in own:
        node = statement.node
        early = early or (not isinstance(node, (ast.Import, ast.ImportFrom)) and _may_matter(node))
        if isinstance(node, (ast.Import, ast.ImportFrom)) and (not early or _is_star(node)):
            if _is_star(node) and early:
                raise BadInput(f"{cell.label}: {statement.text} has to be the first line of its cell in a script")
            _add_import(parts, node)
        elif id(node) in movable:
            parts.before.append(statement)
        else:
            lines += [(depth, text) for text in _body(parts, cell, statement, makers)]
            parts.inside.append(node)
    lines += [(depth, rest)] if rest else []
    if not lines:
        return
    title = f"# {cell.label}" if cell.line is not None else f"# from the notebook ({cell.label})"
    parts.main += [(0, ""), (1, title)]
    if spec.ranks is not None:
        parts.imports["import os"] = None
        ranks = f"({', '.join(map(str, spec.ranks))}{',' * (len(spec.ranks) == 1)})"
        parts.main.append((1, f"if {RANK} in {ranks}:"))
        lines.append((2, "pass")) if all(text.startswith("#") for _, text in lines) else None
    parts.main += lines


def _body(parts: Parts, cell: ExportedCell, statement: Statement, makers: set[str]) -> list[str]:
    """The lines of a statement in `main`; those of a process group are made sure to fit together."""
    node = statement.node
    before = [statement.before] if statement.before else []
    call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    name = str(getattr(call.func, "attr", getattr(call.func, "id", ""))) if call is not None else ""
    if name == DESTROY and call is not None and not call.args and not call.keywords:
        return [*before, f"{LEFT_OUT}{statement.text}  (main ends the process group)"]
    here = names.called(node) & makers
    if not here or "is_initialized" in names.called(node):
        return [*before, statement.text]
    if not parts.group_of:
        parts.group_of = cell.label
        return [*before, statement.text]
    if name == INIT:
        parts.notes.append(f"{cell.label}: removed {INIT}, because the process group of {parts.group_of} stays in use")
        return [*before, f"{LEFT_OUT}{statement.text}  (the group of {parts.group_of} stays)"]
    raise BadInput(
        f"{parts.group_of} and {cell.label} both call {INIT}, but under torchrun a process can do that only once; "
        f"write if not dist.is_initialized(): before {statement.text.splitlines()[0]!r}"
    )


def _makers(every: Sequence[Statement]) -> set[str]:
    """The names of functions that make the process group."""
    found = {INIT}
    while more := {
        s.node.name for s in every
        if isinstance(s.node, (ast.FunctionDef, ast.AsyncFunctionDef)) and s.node.name not in found
        and names.called(s.node) & found and "is_initialized" not in names.called(s.node)
    }:  # fmt: skip
        found |= more
    return found


def _movable(every: Sequence[Statement], on_all: Sequence[Statement]) -> set[int]:
    """Definitions that can go before `main`: set once, and needing nothing at once that `main` computes."""
    nodes = [s.node for s in every]
    if any(names.sees_all(node) for node in nodes):
        return set()
    times: dict[str, int] = {}
    for node in nodes:
        for name in names.bound([node]):
            times[name] = times.get(name, 0) + 1
    found: dict[int, str] = {}
    known = names.BUILTINS | names.bound(n for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom)))
    for node in (s.node for s in on_all):
        if isinstance(node, names.DEFINED) and times[node.name] == 1 and names.needed_at_once(node) <= known:
            found[id(node)] = node.name
            known = known | {node.name}
    return set(found)


def _may_matter(node: ast.AST) -> bool:
    """Whether an import behind this may find another world: another environment or path."""
    return not isinstance(node, names.DEFINED) and any(
        getattr(n, "attr", getattr(n, "id", "")) in EARLY for n in ast.walk(node)
    )


def _is_star(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.names[0].name == "*"


def _add_import(parts: Parts, node: ast.Import | ast.ImportFrom) -> None:
    """One line for each module, as `import a` or `from a import b`."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            parts.imports[ast.unparse(ast.Import([alias]))] = None
        return
    for alias in node.names:
        parts.imports[ast.unparse(ast.ImportFrom(node.module, [alias], node.level))] = None


def _text(parts: Parts, docstring: str) -> str:
    ends = _ending(parts)
    parts.imports[RECORD] = None
    future, plain = _sorted_imports(parts.imports)
    quoted = docstring.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    blocks = [f'"""{quoted}"""\n', *(["\n".join(future) + "\n"] if future else []), "\n".join(plain)]
    text = "\n".join(blocks) + "\n"
    for statement in parts.before:
        text += "\n\n" + (f"{statement.before}\n" if statement.before else "") + statement.text + "\n"
    body = [*_globals(parts), *parts.main[1 if parts.main[:1] == [(0, "")] else 0 :], *ends] or [(1, "pass")]
    if all(not line or line.startswith("#") for _, line in body):
        body.append((1, "pass"))
    text += "\n\n@record\ndef main():\n" + "\n".join(indented(line, depth) for depth, line in body) + "\n"
    text += '\n\nif __name__ == "__main__":\n    main()\n'
    ast.parse(text)
    return text


def _sorted_imports(imports: Iterable[str]) -> tuple[list[str], list[str]]:
    """`from __future__` first; the others as the cells have them, names of one module on one line."""
    future, plain, by_module = [], [], dict[str, list[str]]()
    for line in imports:
        if line.startswith("from __future__"):
            future.append(line)
        elif line.startswith("from ") and not line.endswith("*"):
            module, _, name = line.partition(" import ")
            if module not in by_module:
                plain.append(module)
            by_module.setdefault(module, []).append(name)
        else:
            plain.append(line)
    return future, [f"{line} import {', '.join(by_module[line])}" if line in by_module else line for line in plain]


def _ending(parts: Parts) -> list[tuple[int, str]]:
    """The end of the group, under the name that the cells give torch.distributed."""
    if not parts.group_of:
        return []
    alias = ""
    for line in parts.imports:
        for prefix in (f"import {DISTRIBUTED} as ", "from torch import distributed as "):
            alias = alias or (line.removeprefix(prefix) if line.startswith(prefix) else "")
        alias = alias or ("distributed" if line == "from torch import distributed" else "")
    if not alias:
        parts.imports[f"import {DISTRIBUTED}"] = None
        alias = DISTRIBUTED
    return [(0, ""), (1, f"if {alias}.is_initialized():"), (2, f"{alias}.{DESTROY}()")]


def _globals(parts: Parts) -> list[tuple[int, str]]:
    """Names of `main` that functions outside it look up, or that functions in it declare global."""
    own = names.bound(parts.inside)
    if any(names.sees_all(node) for node in parts.inside):
        wanted = own
    else:
        outside = {name for s in parts.before for name in names.mentioned(s.node)}
        wanted = own & (outside | {n for node in parts.inside for n in names.declared_global(node)})
    for node in parts.inside:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in wanted:
            raise BadInput(
                f"{node.target.id} is used by functions of the script, so it is global there, and Python allows no "
                f"annotation of a global name; write {node.target.id} = … without {ast.unparse(node.annotation)}"
            )
    return [(1, f"global {', '.join(sorted(wanted))}"), (0, "")] if wanted else []


# -- a cell's statements ---------------------------------------------------------------------------


def python(body: str, label: str) -> tuple[str, list[str]]:
    """The cell without IPython's lines, and those. Raises BadInput for what is no Python otherwise."""
    rows = dedented(body).splitlines()
    gone: list[str] = []
    first = next((i for i, row in enumerate(rows) if row.strip() and not row.lstrip().startswith("#")), None)
    if first is not None and rows[first].lstrip().startswith("%%"):
        magic = rows[first].strip()
        if magic.split()[0] not in TRANSPARENT:
            return "".join(f"{LEFT_OUT}{row}\n" for row in rows), [magic]
        rows[first] = f"{LEFT_OUT}{magic}"
        gone.append(magic)
    for _ in range(len(rows) + 1):
        try:
            ast.parse("\n".join(rows))
            break
        except SyntaxError as error:
            number = (error.lineno or 0) - 1
            if not 0 <= number < len(rows) or not MAGIC.match(rows[number]) or LEFT_OUT in rows[number]:
                text = rows[number].strip() if 0 <= number < len(rows) else ""
                raise BadInput(f"cell {label} is not Python that a script can have: {error.msg} at {text!r}") from None
            row = rows[number]
            indent = row[: len(row) - len(row.lstrip())]
            gone.append(row.strip())
            rows[number] = f"{indent}{'pass  ' * bool(indent)}{LEFT_OUT}{row.strip()}"
    return "\n".join(rows) + "\n", gone


def statements(text: str, label: str) -> tuple[list[Statement], str]:
    """The top-level statements of Python text, and the comments behind the last. Raises BadInput for an await that is
    in no function."""
    try:
        compile(text, label, "exec", dont_inherit=True)
    except SyntaxError as error:
        hint = "; put it into an async function, and call asyncio.run" if "await" in (error.msg or "") else ""
        raise BadInput(f"cell {label} cannot be part of a script: {error.msg}{hint}") from None
    rows = text.splitlines()
    found, row = [], 1
    for node in ast.parse(text).body:
        begin = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        own = _between(rows, (begin, 0 if begin < node.lineno else node.col_offset), node)
        found.append(Statement(node, own, _comments(rows[row - 1 : begin - 1])))
        row = max(row, (node.end_lineno or node.lineno) + 1)
    return found, _comments(rows[row - 1 :])


def _between(rows: list[str], begin: tuple[int, int], node: ast.stmt) -> str:
    """The statement's text, with a comment behind it on its last line. Columns count bytes, as ast has them."""
    last, end = node.end_lineno or node.lineno, node.end_col_offset or 0
    lines = [row.encode() for row in rows[begin[0] - 1 : last]]
    tail = lines[-1][end:].decode()
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin[1] :]
    comment = f"  {tail.strip()}" if tail.strip().startswith("#") else ""
    return b"\n".join(lines).decode() + comment


def _comments(rows: list[str]) -> str:
    return "\n".join(row.strip() for row in rows if row.strip().startswith("#"))


def indented(text: str, depth: int) -> str:
    """The text, four columns per `depth` further in; lines that begin within a string stay as they are."""
    kept = set(_in_strings(text))
    pad = " " * 4 * depth
    rows = text.split("\n")
    return "\n".join(pad + row if row.strip() and i not in kept else row for i, row in enumerate(rows, 1))


def _in_strings(text: str) -> Iterator[int]:
    """Numbers of the lines that begin within a string."""
    opened: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        step = STRINGS.get(tokenize.tok_name[token.type], 0)
        if token.type == tokenize.STRING:
            yield from range(token.start[0] + 1, token.end[0] + 1)
        elif step > 0:
            opened.append(token.start[0])
        elif step < 0:
            yield from range(opened.pop() + 1, token.end[0] + 1)
