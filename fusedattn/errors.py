"""The exceptions of fusedattn.

::

    FusedAttnError
    ├── SpecError (ValueError)                 an argument is wrong: shape, dtype, device, value or type
    ├── EngineRefusal (NotImplementedError)    the problem is well formed, but no engine that may be used computes it
    ├── BuildError (RuntimeError)              a plan or kernel cannot be built, or a library not be used
    ├── BundleError (RuntimeError)             a bundle cannot be written, or its plans must not be used
    └── RunFileError (ValueError)              a YAML run file is wrong
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class FusedAttnError(Exception):
    """Base class of every exception that fusedattn raises on purpose.

    Example:
        >>> issubclass(SpecError, FusedAttnError) and issubclass(SpecError, ValueError)
        True
    """


class SpecError(FusedAttnError, ValueError):
    """An argument breaks a rule; raised also where its type is wrong.

    Args:
        argument: Name of the argument at fault.
        expected: The rule, as a noun phrase.
        got: What came instead.
        hint: What to do about it, as a sentence; may be empty.
        function: Public function that was called; may be empty.

    Example:
        >>> str(SpecError("q", "a tensor of rank 4", "rank 3", "Add the batch axis."))
        "argument 'q': expected a tensor of rank 4, got rank 3. Add the batch axis."
    """

    def __init__(self, argument: str, expected: str, got: str, hint: str = "", function: str = "") -> None:
        self.argument, self.expected, self.got, self.hint, self.function = (argument, expected, got, hint, function)
        message = f"argument '{argument}': expected {expected}, got {got}."
        if function:
            message = f"{function}: {message}"
        super().__init__(f"{message} {hint}".rstrip())

    def __reduce__(self) -> tuple[type[SpecError], tuple[str, str, str, str, str]]:
        return type(self), (self.argument, self.expected, self.got, self.hint, self.function)


class EngineRefusal(FusedAttnError, NotImplementedError):
    """A well-formed problem that the engine named by the caller, or every engine, refuses.

    Args:
        engine: The word that the caller passed as ``engine``.
        refused: For each engine that was considered, the reasons of the rules that failed.
        able: The engines that could compute the problem.

    Example:
        >>> print(EngineRefusal("cudnn", {"cudnn": ("dtype: must be float16 or bfloat16, got float32",)}, ("torch",)))
        engine='cudnn' cannot compute this problem:
          cudnn: dtype: must be float16 or bfloat16, got float32
        Engines that can: torch. Pass engine='auto' to let fusedattn choose.
    """

    def __init__(self, engine: str, refused: Mapping[str, tuple[str, ...]], able: tuple[str, ...]) -> None:
        self.engine, self.refused, self.able = engine, dict(refused), able
        lines = [f"engine='{engine}' cannot compute this problem:"]
        shared = [reason for reason in next(iter(refused.values()), ()) if len(refused) > 1]
        shared = [reason for reason in shared if all(reason in reasons for reasons in refused.values())]
        lines += [f"  every engine: {reason}" for reason in shared]
        own = ((name, reason) for name, reasons in refused.items() for reason in reasons if reason not in shared)
        lines += [f"  {name}: {reason}" for name, reason in own]
        if able:
            lines.append(f"Engines that can: {', '.join(able)}. Pass engine='auto' to let fusedattn choose.")
        else:
            lines.append("No engine of this installation can.")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[EngineRefusal], tuple[str, dict[str, tuple[str, ...]], tuple[str, ...]]]:
        return type(self), (self.engine, self.refused, self.able)


class BuildError(FusedAttnError, RuntimeError):
    """What an engine needs could not be built, or a library that it needs cannot be used.

    Args:
        what: What was to be had.
        why: What stood in the way.
        hint: What to do about it, as a sentence; may be empty.

    Example:
        >>> str(BuildError("a cuDNN plan for h100", "no engine takes the graph", "Pass engine='torch'."))
        "cannot have a cuDNN plan for h100: no engine takes the graph. Pass engine='torch'."
    """

    def __init__(self, what: str, why: str, hint: str = "") -> None:
        self.what, self.why, self.hint = what, why, hint
        super().__init__(f"cannot have {what}: {why.rstrip('.')}. {hint}".rstrip())

    def __reduce__(self) -> tuple[type[BuildError], tuple[str, str, str]]:
        return type(self), (self.what, self.why, self.hint)


class BundleError(FusedAttnError, RuntimeError):
    """A bundle cannot be written, or its plans must not be used here.

    No ``BuildError``, so that no call quietly goes to a slower engine while its plans lie in a bundle that is damaged.

    Args:
        folder: The bundle.
        why: What stands in the way.
        hint: What to do about it, as a sentence; may be empty.

    Example:
        >>> str(BundleError("plans", "it has no manifest.json", "Is it a bundle?"))
        "bundle 'plans': it has no manifest.json. Is it a bundle?"
    """

    def __init__(self, folder: str, why: str, hint: str = "") -> None:
        self.folder, self.why, self.hint = folder, why, hint
        super().__init__(f"bundle '{folder}': {why.rstrip('.')}. {hint}".rstrip())

    def __reduce__(self) -> tuple[type[BundleError], tuple[str, str, str]]:
        return type(self), (self.folder, self.why, self.hint)


class RunFileError(FusedAttnError, ValueError):
    """A YAML run file, or a file that it names, cannot be used.

    Example:
        >>> str(RunFileError("problems.0.layout: unknown word 't3h'"))
        "problems.0.layout: unknown word 't3h'"
    """


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """A text in which arguments stand between backticks, with those names replaced."""
    return re.sub(r"`(\w+)`", lambda match: f"`{names.get(match[1], match[1])}`", text)


def public_border(names: Mapping[str, str]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a public function: a ``SpecError`` from inside leaves it once more, naming the function.

    Other arguments that its texts mention, between backticks, get the function's names as well.

    Args:
        names: From argument names used inside ("qkv") to those of the function's signature ("QKV").

    Returns:
        The decorator.

    Raises:
        SpecError: From the decorated function, without the inner traceback.

    Example:
        >>> @public_border({"qkv": "QKV"})
        ... def f():
        ...     raise SpecError("qkv", "rank 4", "rank 3")
        >>> f()
        Traceback (most recent call last):
        fusedattn.errors.SpecError: f: argument 'QKV': expected rank 4, got rank 3.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def bordered(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return function(*args, **kwargs)
            except SpecError as error:
                argument = names.get(error.argument, error.argument)
                expected, got, hint = (_renamed(text, names) for text in (error.expected, error.got, error.hint))
                raise SpecError(argument, expected, got, hint, function.__name__) from None

        return bordered

    return decorate
