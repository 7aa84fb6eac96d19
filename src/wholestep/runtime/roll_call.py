"""Before the first collective of each call, every rank knows that all ranks run the same call of the same graph.

What ranks send is told apart by its order only. Ranks that choose different graphs, models or steps in one call would
average gradients that have nothing to do with each other, or die of a message of another size. So each call begins with
a word from every rank: which call it is, of what, with which numbers, and in how many calls it has sent something (if a
call raises before that on all ranks they can go on, if on one they cannot). The word travels while the forward runs,
over connections of its own, and is heard before the first gradient is sent, when it has long arrived.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import json
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from wholestep import _ranks_torch
from wholestep.capture.binding import Binding
from wholestep.errors import RankError
from wholestep.runtime.agreement import Ranks, lost_peer, require_same, room_of

_MARK_BYTES = 8
# Instead of a mark: this rank runs nothing.
_NOTHING = 0
_POLL_S = 1.0
_LOOK_S = 0.01
# How long the end of a process waits for words whose ranks are late.
_EXIT_WAITS_S = 1.0


@dataclass(frozen=True)
class Part:
    """What a rank does in a call, as far as all ranks have to do the same.

    `facts` stay as they are from call to call; `numbers` are where Python numbers come from that enter updates, and
    `tensors` the slots of tensors that do, other than parameters and optimizer state.
    """

    facts: Mapping[str, Any]
    numbers: Mapping[str, Binding]
    tensors: Sequence[str] = ()

    @cached_property
    def mark(self) -> int:
        return _mark(json.dumps(dict(self.facts), sort_keys=True))

    def values(self, leaves: list[Any]) -> dict[str, int | float]:
        """The numbers of one call; a number that the user keeps in a tensor is not looked at here."""
        found = {name: where.read(leaves) for name, where in self.numbers.items()}
        return {name: value for name, value in found.items() if isinstance(value, (int, float))}


@dataclass(frozen=True)
class _Words:
    """A word that has been sent, and those of all ranks once they are here; `what` it is for, in a message."""

    work: dist.Work
    words: list[torch.Tensor]
    what: str


@dataclass(frozen=True)
class _Spoken:
    """What a rank has said of a call, and all that the word stands for."""

    words: _Words
    ranks: Ranks
    number: int
    step: str
    part: Part
    values: Mapping[str, int | float]


class RollCall:
    """The words of one process group; all steps that run on it share one, as they share its order.

    It must not refer to the group, with which it goes: a channel has threads and sockets of its own.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._room = f"{room_of(ranks.group, 'roll calls')[0]}/roll calls"
        self._channel = _ranks_torch.side_channel(ranks.group, self._room, _ranks_torch.group_timeout_s(ranks.group))
        self._group = ranks.name
        self._num_words = 0
        self._under_way: list[dist.Work] = []
        self._num_sent = 0
        self._spoken: _Spoken | None = None

    @staticmethod
    def of(ranks: Ranks) -> RollCall:
        """The one of a group; the first time all its ranks ask together."""
        if ranks.group not in _known:
            _known[ranks.group] = RollCall(ranks)
        return _known[ranks.group]

    def speak(self, ranks: Ranks, step: str, part: Part, number: int, leaves: list[Any]) -> None:
        """Tell the others what this rank is about to run; returns at once. `ranks` are those of the step."""
        values = part.values(leaves)
        said = [part.mark, number, _mark(repr(list(values.values()))), self._num_sent]
        words = self._say(said, ranks.world, f"the start of call {number} of {step}")
        self._spoken = _Spoken(words, ranks, number, step, part, values)
        _silent[self._group] = self

    def speak_of_failure(self, ranks: Ranks, step: str, number: int, error: BaseException) -> None:
        """Tell the others that this rank runs nothing in a call; they raise, and all can go on with the next one.

        Words are told apart by their order: a rank that said nothing would be a word behind from then on.
        """
        in_room = replace(ranks, number=0, room=self._room)
        with contextlib.suppress(RuntimeError, RankError):  # others are gone: this rank has an error of its own
            in_room.publish_failure(_moment(self._num_words + 1), error)
            self._say([_NOTHING, number, 0, self._num_sent], ranks.world, f"call {number} of {step}, which failed")

    @property
    def has_sent(self) -> bool:
        """Whether this rank has sent something in the call that it spoke of last."""
        return self._group not in _silent

    def forget(self) -> None:
        """The call that this rank spoke of last has raised: nobody will ask what the others have said."""
        self._spoken = None

    def send(self) -> None:
        """This rank is about to send what belongs to the call: hear the others first."""
        self.hear()
        if _silent.pop(self._group, None) is not None:
            self._num_sent += 1

    def hear(self) -> None:
        """Raise `RankError`, on every rank, unless all have said the same."""
        spoken, self._spoken = self._spoken, None
        if spoken is None:
            return
        if not _are_alike(spoken.words, spoken.ranks, spoken.number):
            self._tell(spoken)

    def require_agreement(self, ranks: Ranks, step: str, number: int, facts: Mapping[str, Any]) -> None:
        """Raise `RankError` on every rank if ranks that have heard each other differ in one of these facts.

        A word is enough where they do not, and unlike the store a connection tells at once that a rank is gone.
        """
        what = f"what ranks compare in call {number} of {step}"
        words = self._say([_mark(json.dumps(dict(facts), sort_keys=True))], ranks.world, what)
        if not _are_alike(words, ranks, number):
            ranks.require_agreement(f"{number}/options", facts)

    def _say(self, word: Sequence[int], world: int, what: str) -> _Words:
        """Send a word to all ranks; returns at once."""
        mine = torch.tensor(word, dtype=torch.int64)
        words = [torch.empty_like(mine) for _ in range(world)]
        self._num_words += 1
        try:
            work = self._channel.allgather([words], [mine])
        except RuntimeError as error:
            raise lost_peer(what, error) from error
        self._under_way = [*(other for other in self._under_way if not other.is_completed()), work]
        return _Words(work, words, what)

    def outlive_the_interpreter(self, deadline: float) -> None:
        """Torch would wait at exit until words have come, which threads of C++ then drop: tensors, without Python."""
        while any(not work.is_completed() for work in self._under_way) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if any(not work.is_completed() for work in self._under_way):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._channel))

    def _tell(self, spoken: _Spoken) -> None:
        """Ranks differ, and all know: say in what."""
        facts = {
            **spoken.part.facts,
            "the numbers of calls": {spoken.step: spoken.number},
            "numbers that updates are made with": dict(spoken.values),
            "the calls so far whose gradients were sent (a call that raised has not)": {"calls": self._num_sent},
        }
        ranks = replace(spoken.ranks, number=0, room=self._room)
        by_rank = ranks.exchange(_moment(self._num_words), facts)
        for what in facts:
            require_same(f"in one call, {what}", [each[what] for each in by_rank])
        raise RankError("ranks do not run the same call of the same step; they must call their steps in one order")


# By group, as long as it lives.
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, RollCall] = weakref.WeakKeyDictionary()
# Those that have spoken and not sent yet, by the name of the group.
_silent: weakref.WeakValueDictionary[str, RollCall] = weakref.WeakValueDictionary()


def _leave() -> None:
    deadline = time.monotonic() + _EXIT_WAITS_S
    for roll_call in list(_known.values()):
        roll_call.outlive_the_interpreter(deadline)


atexit.register(_leave)


def before_sending(group: str) -> None:
    """Something is about to be sent to the ranks of a group."""
    if group in _silent:
        _silent[group].send()


def _are_alike(words: _Words, ranks: Ranks, number: int) -> bool:
    """Wait for the words of all ranks, and compare them. A rank that does not come to speak says why elsewhere."""
    while not _have_come(words):
        ranks.require_none_failed(f"{number}/step")
        ranks.require_none_asks(f"{number}/step")
    said = [word.tolist() for word in words.words]
    return all(each == said[0] for each in said)


def _have_come(words: _Words) -> bool:
    """Wait for words, but not for long."""
    try:
        words.work.wait(timedelta(seconds=_POLL_S))
    except RuntimeError as error:
        if not words.work.is_completed():
            return False
        raise lost_peer(words.what, error) from error
    return True


def _moment(number: int) -> str:
    """Where ranks whose words differ say more."""
    return f"word {number}"


def _mark(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:_MARK_BYTES], "big", signed=True)
