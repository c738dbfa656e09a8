"""PlainState: detectors whose whole state is numbers, strings and lists of them, so that it can be saved anywhere."""

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["PlainState"]


class PlainState:
    """Base of every detector: its state is exactly its `__slots__`, plain values or other `PlainState` objects.

    Example:
        >>> class Counter(PlainState):
        ...     __slots__ = ("seen",)
        ...     def __init__(self) -> None:
        ...         self.seen = 0
        >>> counter = Counter()
        >>> counter.load_state({"seen": 3})
        >>> counter.state()
        {'seen': 3}
    """

    __slots__ = ()

    def state(self) -> dict[str, Any]:
        """Return the state as plain Python values that share nothing with the detector; an unknown number is None."""
        content = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, PlainState):
                value = value.state()
            elif isinstance(value, list):
                value = [list(item) if isinstance(item, (list, tuple)) else item for item in value]
            elif isinstance(value, dict):
                value = dict(value)
            elif isinstance(value, float) and value != value:
                value = None
            content[name] = value
        return content

    def load_state(self, content: Mapping[str, Any]) -> None:
        """Take over a state that `state` returned.

        Raises:
            ValueError: names are missing or unknown, or a value is of another type than the detector's own.
        """
        if set(content) != set(self.__slots__):
            raise ValueError(
                f"the state of {type(self).__name__} has the fields {sorted(self.__slots__)}, got {sorted(content)}"
            )
        for name, value in content.items():
            own = getattr(self, name)
            if not _alike(own, value):
                raise ValueError(f"{name!r} of {type(self).__name__} cannot be {value!r:.80}")
            if value is None:
                setattr(self, name, math.nan)
            elif isinstance(own, PlainState):
                own.load_state(value)
            elif isinstance(value, list):
                setattr(self, name, [list(item) if isinstance(item, (list, tuple)) else item for item in value])
            elif isinstance(value, dict):
                setattr(self, name, dict(value))
            else:
                setattr(self, name, value)


def _alike(own: Any, value: Any) -> bool:
    """Whether a value read from a state may take the place of a detector's own one."""
    if isinstance(own, PlainState):
        return isinstance(value, Mapping)
    if isinstance(own, (bool, str, list, dict)):
        return isinstance(value, (list, tuple) if isinstance(own, list) else type(own))
    # A number; what is not known is None.
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
