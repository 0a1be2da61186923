"""Where the ranks' memory is: real models against closed forms, and the figure that tells of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nbddp.capabilities.memory.figure import STYLES
from nbddp.capabilities.memory.parts import RankMemory, sentences, shown_parts
from nbddp.figures.palette import PAPER
from tests.colours import contrast

# -- the pure parts ----------------------------------------------------------------------------

ranks = st.builds(
    RankMemory, rank=st.integers(0, 99), kind=st.sampled_from(["cpu", "cuda"]), parameters=st.integers(0, 2**40),
    buffers=st.integers(0, 2**30), gradients=st.integers(0, 2**40), optimizer=st.integers(0, 2**40),
    buckets=st.integers(0, 2**40), peak=st.integers(0, 2**42), start=st.integers(0, 2**30),
)  # fmt: skip


@given(ranks)
def test_parts_and_rest_make_the_total(rank: RankMemory) -> None:
    assert sum(some[0] for _, some in shown_parts([rank])) == rank.total
    assert rank.total >= rank.kept
    assert rank.rest == 0 or rank.total + rank.start == rank.peak + rank.outside


def of(rank: int, kind: str = "cuda", peak: int = 60) -> RankMemory:
    g = 2**30
    return RankMemory(rank, kind, 6 * g, 0, 6 * g, 12 * g, 6 * g, peak=(peak + rank) * g, outside=0)


def test_labels_can_be_read_and_kinds_differ_without_colour() -> None:
    assert all(contrast(fill, PAPER) >= 4.5 for fill, _, _, ink in STYLES.values() if ink == PAPER)
    assert len({hatch for _, hatch, _, _ in STYLES.values()}) == len(STYLES)


def test_process_peaks_are_not_called_activations() -> None:
    words = "\n".join(sentences([of(0, "cpu")]))
    assert "the process held 30 GiB more: activations, temporaries, freed memory that is kept, libraries" in words
    assert [name for name, _ in shown_parts([of(0, "cpu"), of(1)])][-1] == "process: the rest"
