"""What C code gets at through objects that the step has made: views, iterators, containers, indices of tensors."""

from __future__ import annotations

import pytest
from tests.unit.capture.test_stale_reads import outcome_of
from tests.unit.capture.test_unseen import Case

LISTS = "D = {'a': [1], 'b': [1, 2]}\nC = types.SimpleNamespace(keep=[0, 1], two=types.SimpleNamespace(n=[1]))\n"
READS = {
    "index": "x[:, C.keep].sum()",
    "index in a tuple": "x[([0], C.keep[:1])].sum()",
    "map": "max(map(len, D.values()))",
    "sum of a map": "sum(map(len, D.values()))",
    "sorted": "len(sorted(D.values())[0])",
    "key": "len(max(D.values(), key=len))",
    "start": "len(sum(D.values(), []))",
    "chain": "len(list(itertools.chain(*D.values())))",
    "chain from one": "len(list(itertools.chain.from_iterable(D.values())))",
    "zip": "sum(a for pair in zip(*D.values()) for a in pair)",
    "product": "len(list(itertools.product(*D.values())))",
    "text": "len(','.join(map(str, D.values())))",
    "map of vars": "len(list(map(vars, [C.two]))[0]['n'])",
    "reduce": "len(functools.reduce(operator.add, D.values(), []))",
    "json": "len(json.dumps({'a': D['a']}))",
    "any of a list": "(2.0 if any(q[-1] > 1 for q in [D['a']]) else 1.0)",
    "starred generator": "max(0, *(len(value) for value in D.values()))",
    "equal tuples": "(2.0 if (D['a'], 1) == ([1], 1) else 1.0)",
    "equal lists": "(2.0 if [D['a']] == [[1]] else 1.0)",
    "equal dicts": "(2.0 if {'a': D['a']} == {'a': [1]} else 1.0)",
    "less": "(2.0 if (D['a'],) < ([1, 1],) else 1.0)",
    "in a tuple": "(2.0 if D['a'] in ([1],) else 1.0)",
    "outside in a made list": "(2.0 if [1] in [D['a']] else 1.0)",
    "equal namespaces": "(2.0 if types.SimpleNamespace(n=D['a']) == types.SimpleNamespace(n=[1]) else 1.0)",
    "text of a tuple": "len(f\"{(D['a'],)}\")",
    "text with a width": "len(f\"{str((D['a'],)):>5}\")",
    "text of a dict": "len(str({'a': D['a']}))",
    "slice of a list": "len(put_in([0, 0, 0], D['a']))",
    "count": "[[1], [2]].count(D['a'])",
    "array by a list": "np.arange(4.0)[C.keep].sum()",
}  # fmt: skip
PUT_IN = "\ndef put_in(made, value):\n    made[1:] = value\n    return made\n"


@pytest.mark.sample(10)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_lists_behind_what_the_step_makes_are_read(read: str) -> None:
    change = "D['a'].extend([2, 3, 4]); D['b'].append(0); C.keep = [1]; C.two.n.append(2)"
    case = Case("reached", LISTS + PUT_IN, loss=f"loss = loss * {read}", changes=(change, ""))
    assert outcome_of(case).captures > 1


def test_the_list_that_is_written_to_is_chosen_at_each_call() -> None:
    chosen = "loss = loss * 2.0\nsorted(D.values(), key=len)[0].append(1.0)"
    outcome_of(Case("chosen", LISTS, loss=chosen, changes=("D['a'].extend([1, 1, 1])", "")))


@pytest.mark.parametrize("write", ["operator.iadd, D.values(), ([1], [1])", "list.clear, D.values()"])
def test_writes_of_c_to_what_it_reaches_are_refused(write: str) -> None:
    case = Case("written", LISTS, loss=f"loss = loss * len(list(map({write})))", refused="cannot be done again")
    outcome_of(case)


def test_a_view_that_was_there_before_is_refused() -> None:
    case = Case("view", f"{LISTS}V = D.values()\n", loss="loss = loss * max(map(len, V))", refused="dict_values")
    outcome_of(case)


def test_an_array_and_what_is_made_after_it_are_two() -> None:
    made = "loss = loss * 2.0\nC.pos = np.arange(2)\nC.info = {'n': 1, 'm': [2]}"
    outcome_of(Case("array", LISTS, loss=made, changes=("C.info = None", "")))
