"""How the checkers of the exercises work: a slow specification, random cases, known mistakes.

A `Check` calls the learner's function on cases drawn from a seed and compares with its specification. When
they differ it looks, in this order, for
1. a function that raises, returns nothing or changes its arguments;
2. a known mistake that gives the learner's values in every case that is wrong;
3. a change of the arguments that must not matter, and does ("the diagonal still counts");
4. anything else that can be said: another shape, NaN, transposed, a constant factor.
It names what went wrong, never the value that was expected.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

TOLERANCE = 1e-3  # of the largest value of a case: float32 answers pass, the mistakes are far larger

Args = tuple
Cases = Iterable[tuple[str, Args]]  # what is special about the case, and the arguments


class _Problem(Exception):
    """The learner's function gave no answer that could be compared."""


@dataclass(frozen=True)
class Check:
    """One checker. Calling it prints "passed" or a hint; `hint` returns it, `require` raises it.

    specification, mistakes: functions of float64 numpy arrays. cases: from a numpy Generator to (description,
    arguments). keeps: hint -> a change of the arguments that must leave the answer as it is.
    """

    call: str  # the exercise's signature: "hsic(K, L)"
    specification: Callable
    cases: Callable[[np.random.Generator], Cases]
    mistakes: Mapping[str, Callable | tuple[Callable, ...]]  # several ways to one mistake
    keeps: Mapping[str, Callable[..., Args]] = field(default_factory=dict)
    otherwise: str = "work the simplest one out by hand"  # when none of these is what is wrong

    @property
    def name(self) -> str:
        return self.call.partition("(")[0]

    def __call__(self, function: Callable, seed: int = 0) -> None:
        hint = self.hint(function, seed)
        count = len(list(self.cases(np.random.default_rng(seed))))
        print(f"not yet: {hint}" if hint else f"passed: {self.name} is right in {count} cases of {count}")

    def require(self, function: Callable, seed: int = 0) -> None:
        """For tests: AssertionError with the hint when the function is wrong."""
        if hint := self.hint(function, seed):
            raise AssertionError(hint)

    def hint(self, function: Callable, seed: int = 0) -> str:
        """The likely mistake in words; empty when the function is right."""
        if not callable(function):
            return (f"a {type(function).__name__} was given: pass the function itself, its name without "
                    f"brackets, as in checks.{self.name}(my_{self.name})")
        cases = list(self.cases(np.random.default_rng(seed)))
        answers, problems = {}, {}
        for i, (what, args) in enumerate(cases):
            try:
                answers[i] = _answer(function, args)
            except _Problem as problem:
                problems[i] = f"with {what}, your function {problem}".replace("{call}", self.call)
        wanted = {i: np.asarray(self.specification(*cases[i][1]), float) for i in answers}
        wrong = [i for i in answers if not _close(answers[i], wanted[i])]
        if not wrong:
            return next(iter(problems.values()), "")
        finite = [i for i in wrong if np.isfinite(answers[i]).all()] or wrong
        known = self._known_mistake(cases, answers, answers) or self._known_mistake(cases, answers, finite)
        return (_unsteady(function, *cases[wrong[0]], answers[wrong[0]])
                or known or next(iter(problems.values()), "")
                or _bad_values([(cases[i][0], answers[i], wanted[i]) for i in wrong])
                or self._broken_rule(function, cases)
                or _pattern([(answers[i], wanted[i]) for i in answers if wanted[i].any()])
                or self._where([cases[i][0] for i in wrong], len(cases)))

    def _known_mistake(self, cases: list, answers: dict, among: Iterable[int]) -> str:
        """The mistake that gives the learner's values in all cases `among`, right ones included."""
        for hint, mistakes in self.mistakes.items():
            for mistake in mistakes if isinstance(mistakes, tuple) else (mistakes,):
                if all(_same(mistake, cases[i][1], answers[i]) for i in among):
                    return hint
        return ""

    def _broken_rule(self, function: Callable, cases: list) -> str:
        for hint, change in self.keeps.items():
            for _, args in cases:
                try:  # in float64 where the function takes it: what is left is no rounding
                    before, after = (_answer(function, a, FINEST_FIRST) for a in (args, change(*args)))
                except _Problem:
                    continue
                if not _close(after, before, 10 * TOLERANCE):
                    return hint
        return ""

    def _where(self, wrong: list[str], count: int) -> str:
        if len(wrong) == count:
            return f"the values differ in every case, also with {wrong[0]}: {self.otherwise}"
        which = "; ".join(wrong[:2]) + "; …" * (len(wrong) > 2)
        return f"right in {count - len(wrong)} cases of {count}, wrong with {which}: {self.otherwise}"


def normal(rng: np.random.Generator, *shape: int, mean: float = 0.0) -> np.ndarray:
    """Normal float64 numbers that float32 tensors hold exactly."""
    return (mean + rng.normal(size=shape)).astype(np.float32).astype(float)


def _answer(function: Callable, args: Args, kinds: tuple | None = None) -> np.ndarray:
    """The learner's answer as an array; _Problem, in words, when there is none.

    The arguments are float32 tensors; a function that raises on them is tried with other kinds, so that
    numpy answers and float64 answers work as well.
    """
    first = None
    for kind in kinds or (_float32, _float64, _numpy):
        given, kept = kind(args), kind(args)
        try:
            with warnings.catch_warnings():  # a numpy function given a tensor warns of numpy's future
                warnings.simplefilter("ignore", DeprecationWarning)
                value = function(*given)
        except Exception as error:  # whatever a learner's function raises is told to the learner
            first = first or error
            continue
        if any(not _equal(a, b) for a, b in zip(given, kept, strict=True)):
            raise _Problem("changes its arguments: work on a copy, or the cells after it see other values")
        return _array(value)
    if isinstance(first, TypeError) and not _takes(function, len(args)):
        raise _Problem("cannot be called as {call}: look at its arguments")
    raise _Problem(f"raises {type(first).__name__}: {str(first)[:200]}")


def _array(value) -> np.ndarray:
    if value is None:
        raise _Problem("returns None: is the return missing?")
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.double() if value.dtype == torch.bfloat16 else value
    try:
        array = np.asarray(value)
        if array.dtype == object:  # a list of tensors
            array = np.stack([_array(item) for item in value])
        if array.dtype.kind not in "fiub":
            raise TypeError
    except (TypeError, ValueError, RuntimeError):
        raise _Problem(f"returns a {type(value).__name__} that is no array of real numbers") from None
    return array.astype(float)


def _close(answer: np.ndarray, want: np.ndarray, tolerance=TOLERANCE, equal_nan=False) -> bool:
    if answer.size == want.size == 1:  # a number, however it is wrapped
        answer, want = answer.reshape(()), want.reshape(())
    finite = np.abs(want[np.isfinite(want)])
    slack = tolerance * finite.max(initial=0) + 1e-5
    return answer.shape == want.shape and np.allclose(answer, want, rtol=0, atol=slack, equal_nan=equal_nan)


def _same(mistake: Callable, args: Args, answer: np.ndarray) -> bool:
    """Whether a known mistake gives this answer; one that cannot be made with these arguments does not."""
    try:
        with np.errstate(all="ignore"):
            return _close(answer, np.asarray(mistake(*args), float), equal_nan=True)
    except (ValueError, IndexError, ZeroDivisionError, np.linalg.LinAlgError):
        return False


def _unsteady(function: Callable, what: str, args: Args, answer: np.ndarray) -> str:
    try:
        again = _answer(function, args)
    except _Problem as problem:
        return f"with {what}, your function works once, and called again it {problem}"
    return "" if _close(again, answer, equal_nan=True) else (
        f"with {what}, your function gives another answer when it is called again with the same arguments: "
        "does it draw random numbers, or keep something from the call before?")


def _bad_values(wrong: list[tuple[str, np.ndarray, np.ndarray]]) -> str:
    for what, answer, want in wrong:
        if answer.shape != want.shape and not answer.size == want.size == 1:
            turned = answer.ndim == 2 and answer.T.shape == want.shape
            return (f"with {what}, your function returns the shape {answer.shape}, needed is {want.shape}"
                    + turned * ": rows and columns are exchanged")
        if not np.isfinite(answer).all():
            return (f"with {what}, your function returns NaN or infinite values: look for a division by "
                    "zero, or a root of something negative")
    return ""


def _pattern(wrong: list[tuple[np.ndarray, np.ndarray]]) -> str:
    """What the answers have in common, without saying how much they are off."""
    if all(answer.ndim == 2 and _close(answer.T, want) for answer, want in wrong):
        return "your result is transposed"
    if all(_close(-answer, want) for answer, want in wrong):
        return "the sign is wrong"
    if all(_close(answer**2, want) for answer, want in wrong):
        return "you took a root too many"
    if all(_close(np.sqrt(np.abs(answer)), want) for answer, want in wrong):
        return "a root is missing"
    factors = [np.vdot(answer, want) / np.vdot(answer, answer) for answer, want in wrong if answer.any()]
    if len(factors) == len(wrong) and all(_close(a * c, w) for (a, w), c in zip(wrong, factors, strict=True)):
        if np.ptp(factors) <= TOLERANCE * np.abs(factors).max():
            return "your values are the right ones times a constant, the same in every case"
        if any(answer.size > 1 for answer, _ in wrong):
            return ("your values are the right ones times a factor that changes with the sizes: look at what "
                    "you divide by")
    if all(answer.size > 1 and _close(answer - answer.mean(), want - want.mean()) for answer, want in wrong):
        return "your values are the right ones plus a constant: something is added, or not taken off"
    return ""


def _takes(function: Callable, count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def _float32(args: Args) -> Args:
    return tuple(_convert(a, lambda x: torch.tensor(x, dtype=torch.float32 if x.dtype.kind == "f" else None))
                 for a in args)


def _float64(args: Args) -> Args:
    return tuple(_convert(a, torch.tensor) for a in args)


def _numpy(args: Args) -> Args:
    return tuple(_convert(a, np.copy) for a in args)


FINEST_FIRST = (_float64, _numpy, _float32)


def _convert(value, change: Callable):
    if isinstance(value, list):
        return [_convert(item, change) for item in value]
    return change(value) if isinstance(value, np.ndarray) else value


def _equal(a, b) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return np.array_equal(np.asarray(a), np.asarray(b))
