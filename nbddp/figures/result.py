"""The results of `nbddp.Pool`'s methods: one value that shows a figure, reads as text, and gives plain data."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from nbddp.errors import warn_deprecated
from nbddp.protocol.messages import Metadata, MimeBundle

Found = TypeVar("Found")
Row = dict[str, Any]


@runtime_checkable
class Picture(Protocol):
    """A drawing with a picture: a `DescribedFigure`. Tables and reports have none."""

    def caption(self, line: str) -> None: ...
    def save(self, path: str) -> None: ...
    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[MimeBundle, Metadata]: ...


@dataclass(frozen=True, eq=False, repr=False)
class Result(Generic[Found]):
    """The result of a method of `nbddp.Pool`.

    A notebook shows its figure, as the magic of the same name does. `str(result)` is the text, `to_dict()` the data,
    and `to_frame()` the data as a pandas table. Names of numbers end in their unit: `_s` seconds, `_bytes` bytes,
    `_bytes_per_s`. Ranks are numbers from 0.

    All data has `simulated_gpus` (bool) and `notes` (list of str: limitations of the data). If `simulated_gpus` is
    True, the CPU computed in place of GPUs, and times are not a GPU's.
    """

    _found: Found
    simulated_gpus: bool = False
    notes: tuple[str, ...] = ()
    _columns: ClassVar[tuple[str, ...]] = ()  # of a result that may have no rows

    def _draw(self) -> Any:
        """What a notebook shows: a described figure, or a table or report with its own text and HTML."""
        raise NotImplementedError

    def _data(self) -> Row:
        """The other fields of `to_dict`."""
        raise NotImplementedError

    def _rows(self) -> Sequence[Row]:
        """The rows of `to_frame`."""
        raise NotImplementedError

    def _captions(self) -> Sequence[str]:
        """The notes that the drawing itself does not have."""
        return self.notes

    @functools.cached_property
    def _drawn(self) -> Any:
        drawn, more = self._draw(), self._captions()
        if isinstance(drawn, Picture) and more:
            drawn.caption("\n".join(more))
        return drawn

    def to_dict(self) -> Row:
        """The data as dicts, lists, str, int, float, bool and None, which `json.dumps` takes.

        Example:

            import json
            text = json.dumps(pool.status().to_dict())
        """
        return {"simulated_gpus": self.simulated_gpus, "notes": list(self.notes), **self._data()}

    def to_frame(self) -> Any:
        """The rows of the data as a `pandas.DataFrame`, with a column `simulated_gpus`. `frame.attrs` has the notes.

        Raises ImportError where pandas is not installed.

        Example:

            idle = pool.status().to_frame().query("state == 'idle'")
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as e:
            raise ImportError(f"to_frame() needs pandas ({e}); pip install pandas, or use to_dict()") from None
        rows = [{**row, "simulated_gpus": self.simulated_gpus} for row in self._rows()]
        frame = pandas.DataFrame(rows, columns=[*self._columns, "simulated_gpus"] if self._columns else None)
        frame.attrs["notes"] = list(self.notes)
        return frame

    def __repr__(self) -> str:
        more = [] if isinstance(self._drawn, Picture) else self._captions()
        return "\n".join([repr(self._drawn), *more])

    def _repr_html_(self) -> str:
        data = self._repr_mimebundle_()[0]
        return str(data["text/html"])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[MimeBundle, Metadata]:
        if isinstance(self._drawn, Picture):
            return self._drawn._repr_mimebundle_()
        more = "".join(f"<div>{escape(note)}</div>" for note in self._captions())
        return {"text/html": self._drawn._repr_html_() + more, "text/plain": repr(self)}, {}

    def save(self, path: str) -> None:
        """Write the figure to a PNG file. path (str): its name.

        Raises TypeError for a result without a figure, and OSError if the file cannot be written.

        Example:

            pool.topology().save("topology.png")
        """
        if not isinstance(self._drawn, Picture):
            raise TypeError(f"{type(self).__name__} has no figure; write str(), to_dict() or to_frame()")
        self._drawn.save(path)

    if not TYPE_CHECKING:  # nbddp 0.1 returned what `_found` holds

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or not hasattr(self._found, name):
                raise AttributeError(f"{type(self).__name__} has no {name!r}; to_dict() has its data")
            self._warn(f".{name}")
            return getattr(self._found, name)

        def __getitem__(self, key: Any) -> Any:
            self._warn(f"[{key!r}]")
            return self._found[key]

        def __iter__(self) -> Iterator[Any]:
            self._warn(" as a sequence")
            return iter(self._found)

        def __len__(self) -> int:
            self._warn(" as a sequence")
            return len(self._found)

        def __bool__(self) -> bool:
            return True

        def _warn(self, what: str) -> None:
            warn_deprecated(f"{type(self).__name__}{what}", "use to_dict()", "0.3", stacklevel=4)
