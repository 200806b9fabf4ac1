#!/usr/bin/env python
"""Time to build a cuDNN plan against time to load it, from a bundle and from the disk cache; no GPU is needed.

    scripts/bench_plans.py [RUN.yaml] [TARGET...]

Writes results/bench_plans.json. A load is all that stands between a key and a graph that can be run: the file is read,
its digest checked, and cuDNN takes it. Builds are cold, since cuDNN keeps none; loads are medians of several.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fusedattn.bundle_format import Bundle
from fusedattn.bundle_write import write_bundle
from fusedattn.engines.cudnn_key import SdpaKey
from fusedattn.engines.cudnn_plan import load_plan, plan_name
from fusedattn.errors import BuildError
from fusedattn.runs.compile import compile_run, parse_targets
from fusedattn.runs.load import load_run
from fusedattn.runs.needed import calls_of, record
from fusedattn.runs.plan_builder import Built, PlanBuilder, build_here
from fusedattn.runs.report import document, write_json
from fusedattn.store import Store
from fusedattn.target import DeviceTarget

REPEATS = 11
OUT = Path("results/bench_plans.json")
DEMO = Path(__file__).parent.parent / "configs" / "compile_demo.yaml"


class Here(PlanBuilder):
    """Builds in this process, one plan after another, so that none slows another down."""

    def __init__(self) -> None:
        self.keys: dict[str, SdpaKey] = {}

    def build(self, keys: Iterable[SdpaKey]) -> Iterator[tuple[SdpaKey, Built | BuildError]]:
        for key in keys:
            self.keys[key.text()] = key
            yield key, build_here(key)


def load_ms(target: DeviceTarget, read: Callable[[str], bytes | None], name: str) -> float:
    """Median time to read a plan by its name and have cuDNN take it."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        load_plan(target, read(name) or b"")
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def main(file: Path, names: list[str]) -> None:
    run, targets, here = load_run(file), parse_targets(names), Here()
    # What the first plan of a process pays for the library is no part of any row.
    build_here(record(next(calls_of(run, targets, file.parent)), {}).keys[0])
    compiled = compile_run(run, targets, file.parent, here, lambda done, total, what: print(f"{done}/{total} {what}"))
    assert compiled.manifest is not None
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_bundle(Path(folder, "bundle"), compiled.manifest, compiled.blobs, replace=False)
        bundle, store = Bundle.open(Path(folder, "bundle")), Store(Path(folder, "cache"), 1 << 30)
        for plan in bundle.manifest.plans:
            key = here.keys[plan.key]
            store.save(plan_name(key), compiled.blobs[plan.file])
            loads = {
                "bundle": load_ms(key.target, bundle.plan, plan.key),
                "disk": load_ms(key.target, store.load, plan_name(key)),
            }
            rows.append(
                plan.model_dump(include={"problem", "cases", "direction", "target", "bytes", "build_ms"})
                | {f"{source}_load_ms": ms for source, ms in loads.items()}
                | {f"{source}_ratio": plan.build_ms / ms for source, ms in loads.items()}
            )
    summary = {
        name: {"least": min(found), "median": statistics.median(found)}
        for name in ("bundle_ratio", "disk_ratio")
        for found in [[row[name] for row in rows]]
    }
    OUT.parent.mkdir(exist_ok=True)
    write_json(OUT, document(run, []) | {"cudnn": bundle.manifest.cudnn, "summary": summary, "rows": rows})
    print(f"{len(rows)} plans: {summary}. Written to {OUT}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DEMO, sys.argv[2:] or ["a100", "h100", "b200"])
