"""What the methods of `nbddp.Pool` find: one value that is shown as a figure, read as text, and taken as plain data."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from nbddp.output.table import Table
from nbddp.protocol.deprecation import warn_deprecated
from nbddp.protocol.messages import Metadata, MimeBundle

Found = TypeVar("Found")
Row = dict[str, Any]


@dataclass(frozen=True, eq=False, repr=False)
class Result(Generic[Found]):
    """What a method of a pool has found.

    A notebook shows its figure, as the magic of the same name does. `str(result)` is the text, `to_dict()` the data,
    and `to_frame()` the data as a pandas table. Names of numbers end in their unit: `_s` seconds, `_bytes` bytes,
    `_bytes_per_s`. Ranks are numbers from 0.

    All data has `simulated_gpus` (bool) and `notes` (list of str: what else is to be known). Where `simulated_gpus` is
    True, the CPU computed in place of GPUs, and times are not a GPU's.
    """

    _found: Found
    simulated_gpus: bool = False
    notes: tuple[str, ...] = ()
    _columns: ClassVar[tuple[str, ...]] = ()  # of a result that may have no rows

    def _draw(self) -> Any:
        """What a notebook shows: a figure with its words, or a `Table`."""
        raise NotImplementedError

    def _data(self) -> Row:
        """What `to_dict` has besides."""
        raise NotImplementedError

    def _rows(self) -> Sequence[Row]:
        """The rows of `to_frame`."""
        raise NotImplementedError

    @functools.cached_property
    def _drawn(self) -> Any:
        drawn = self._draw()
        if not isinstance(drawn, Table):
            for note in self.notes:
                drawn.caption(note)
        return drawn

    def to_dict(self) -> Row:
        """The data as dicts, lists, str, int, float, bool and None, which `json.dumps` takes."""
        return {"simulated_gpus": self.simulated_gpus, "notes": list(self.notes), **self._data()}

    def to_frame(self) -> Any:
        """The rows of the data as a `pandas.DataFrame`, with a column `simulated_gpus`.

        Raises ImportError where pandas is not installed.
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
        told = [] if not isinstance(self._drawn, Table) else self.notes
        return "\n".join([repr(self._drawn), *told])

    def _repr_html_(self) -> str:
        data = self._repr_mimebundle_()[0]
        return str(data["text/html"])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[MimeBundle, Metadata]:
        if not isinstance(self._drawn, Table):
            shown: tuple[MimeBundle, Metadata] = self._drawn._repr_mimebundle_()
            return shown
        notes = "".join(f"<div>{escape(note)}</div>" for note in self.notes)
        return {"text/html": self._drawn._repr_html_() + notes, "text/plain": repr(self)}, {}

    def save(self, path: str) -> None:
        """Write the figure to a PNG file. Raises TypeError for a result that is a table."""
        if isinstance(self._drawn, Table):
            raise TypeError(f"{type(self).__name__} is shown as a table, without a figure; write str() or to_frame()")
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
