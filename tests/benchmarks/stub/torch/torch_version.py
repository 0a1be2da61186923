class TorchVersion(str):
    """Compared as torch's own: by its numbers."""

    def _numbers(self):
        return tuple(int(part) for part in self.split("+")[0].split("."))

    def __ge__(self, other):
        return self._numbers() >= tuple(other)

    def __lt__(self, other):
        return self._numbers() < tuple(other)

    def __gt__(self, other):
        return self._numbers() > tuple(other)

    def __le__(self, other):
        return self._numbers() <= tuple(other)

    __hash__ = str.__hash__
