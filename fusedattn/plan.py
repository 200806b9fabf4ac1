"""``Plan``: which engine computes a problem, and why."""

from __future__ import annotations

from dataclasses import dataclass

from fusedattn.enums import Engine
from fusedattn.errors import EngineRefusal
from fusedattn.rules import refusals
from fusedattn.spec import AttentionSpec

_PREFERENCE = (Engine.cudnn, Engine.torch)


@dataclass
class Plan:
    """The choice for one problem.

    Attributes:
        spec: The problem.
        engine: Who computes it; None where every engine that may is refused.
        reason: Why, in one line.
        refused: Engines that do not take it, to the rules that failed.
        requested: What the caller asked for.
    """

    spec: AttentionSpec
    engine: Engine | None
    reason: str
    refused: dict[str, tuple[str, ...]]
    requested: Engine

    def chosen(self) -> Engine:
        """The engine.

        Returns:
            The engine that computes.

        Raises:
            EngineRefusal: There is none, with every failed rule and the engines that could.
        """
        if self.engine is None:
            considered = [self.requested] if self.requested is not Engine.auto else list(self.refused)
            reasons = {Engine(engine).word: self.refused[Engine(engine).word] for engine in considered}
            able = tuple(engine.word for engine in _PREFERENCE if engine.word not in self.refused)
            raise EngineRefusal(self.requested.word, reasons, able)
        return self.engine

    def fall_back(self, engine: Engine, why: str) -> bool:
        """Take the torch engine in the place of one that could not build what it needs, now and from now on.

        Args:
            engine: The one that failed.
            why: Its reason.

        Returns:
            Whether that may be: the caller named no engine, and the torch engine takes the problem.

        Raises:
            Nothing.
        """
        if self.requested is not Engine.auto or engine is Engine.torch or Engine.torch.word in self.refused:
            return False
        self.refused[engine.word] = (f"build: {why}",)
        self.engine = Engine.torch
        self.reason = f"auto: the {engine.word} engine could not build what it needs"
        return True

    def fallback_warning(self) -> str | None:
        """What a user of a GPU should hear: that no fast engine takes the problem; None where that is not so."""
        if self.requested is Engine.auto and self.engine is Engine.torch and self.spec.target is not None:
            reasons = "; ".join(self.refused[Engine.cudnn.word])
            # What could not be built is told once, whichever direction finds it again.
            direction = "" if reasons.startswith("build: ") else f"{self.spec.direction.word} "
            what = f"{direction}on {self.spec.device}"
            return f"fusedattn computes {what} with the torch engine, which is slower: {reasons}"
        return None


def make_plan(spec: AttentionSpec, requested: Engine) -> Plan:
    """Choose the engine for a problem.

    Args:
        spec: The problem.
        requested: ``auto``, or the only engine that may compute it.

    Returns:
        The plan; its engine is None where every engine that may is refused.

    Raises:
        Nothing.

    Example:
        >>> import torch
        >>> from fusedattn.enums import NVTE_QKV_Layout
        >>> from fusedattn.spec import TensorSpec
        >>> q = TensorSpec.of(torch.empty(1, 2, 3, 4))
        >>> make_plan(
        ...     AttentionSpec.of(layout=NVTE_QKV_Layout.NVTE_BHSD_BHSD_BHSD, operands=(q, q, q)), Engine.auto
        ... ).reason
        'auto: on cpu the torch engine is the first that takes the problem'
    """
    reasons = {engine.word: refusals(engine, spec) for engine in Engine if engine is not Engine.auto}
    refused = {word: failed for word, failed in reasons.items() if failed}
    if requested is not Engine.auto:
        able = requested.word not in refused
        reason = f"the caller named {requested.word}" + ("" if able else ", which does not take the problem")
        return Plan(spec, requested if able else None, reason, refused, requested)
    for engine in _PREFERENCE:
        if engine.word not in refused:
            reason = f"auto: on {spec.device.type} the {engine.word} engine is the first that takes the problem"
            return Plan(spec, engine, reason, refused, requested)
    return Plan(spec, None, "auto: no engine takes the problem", refused, requested)
