"""Runs a grid: warm-up with an estimate of the time it takes, then block after block until all is measured or time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trtllm_v4tree.bench.measure import Sample, decode, sample
from trtllm_v4tree.bench.plan import GridPlan, Unit
from trtllm_v4tree.bench.samples import SampleFile
from trtllm_v4tree.errors import RequestError
from trtllm_v4tree.llm import LLM

Prompts = Mapping[str, list[list[int]]]
"""Token ids of the prompts by data set."""

_WARMUP_PROMPT, _WARMUP_TOKENS = 24, 9


@dataclass(frozen=True)
class Tick:
    """Where a run stands: seconds predicted at the start for what is done and for all, and the block that comes next."""

    done: float
    total: float
    label: str


Watch = Callable[[Tick], None]


def check_fits(llm: LLM, plan: GridPlan, prompts: Prompts) -> None:
    """RequestError, before anything runs, for what this engine cannot do: batch, budget, shape, or pages for a full batch."""
    sizes = llm.manifest.sizes
    too_large = [b for b in plan.batch_sizes if not 1 <= b <= sizes.max_batch_size]
    if too_large:
        raise RequestError(
            f"batch size {too_large[0]} is out of range: this engine decodes 1 to {sizes.max_batch_size} sequences together; "
            "give smaller --batch_sizes or build with a larger --max_batch_size."
        )
    for name in plan.speculations():
        llm.set_speculation(name)
    llm.set_speculation("none")
    longest = max(len(p) for ids in prompts.values() for p in ids) + plan.max_tokens
    room = (sizes.num_pages - 1) // llm.engine.pools.pages_for(longest)
    if max(plan.batch_sizes) > room:
        raise RequestError(
            f"{max(plan.batch_sizes)} sequences of {longest} tokens do not fit this engine's {sizes.num_pages - 1} pages "
            f"(room for {room}): give smaller --batch_sizes or --max_tokens, or build with more --num_pages."
        )


def fitting_prompts(encoded: Sequence[list[int]], name: str, max_seq_len: int, plan: GridPlan) -> list[list[int]]:
    """The first `num_prompts` prompts that leave room for max_tokens; RequestError if there are fewer."""
    fitting = [ids for ids in encoded if len(ids) + plan.max_tokens <= max_seq_len][: plan.num_prompts]
    if len(fitting) < plan.num_prompts:
        raise RequestError(
            f"dataset {name} has {len(fitting)} prompts that leave room for {plan.max_tokens} tokens within "
            f"{max_seq_len}: give --num_prompts {len(fitting)} or fewer, or a smaller --max_tokens."
        )
    return fitting


class Grid:
    """One run of a plan on one engine. `estimate` warms up every configuration; `run` measures what the file lacks."""

    def __init__(self, llm: LLM, plan: GridPlan, prompts: Prompts) -> None:
        self.llm, self.plan, self.prompts = llm, plan, prompts
        self._costs: dict[int, float] = {}

    def estimate(self, done: Sequence[Sample], watch: Watch | None = None) -> float:
        """Seconds that the units not in `done` will take, from a short run of every configuration at every batch size."""
        batches = sorted({u.batch for u in self.missing(done)})
        for number, batch in enumerate(batches):
            if watch:
                watch(Tick(number, len(batches), f"warming up batch {batch}"))
            self._costs[batch] = self._warm_up(batch)
        return sum(self._costs[u.batch] for u in self.missing(done))

    def estimate_other(self, plan: GridPlan) -> float:
        """Seconds that another plan over the same data sets would take, after `estimate`: every token as long as it takes with this
        plan's speculations at the nearest batch size below, or above if there is none."""
        names = len(self.plan.speculations())
        per_token = {b: cost / (names * self.plan.max_tokens * b) for b, cost in self._costs.items()}
        total = 0.0
        for unit in plan.units():
            nearest = max((b for b in per_token if b <= unit.batch), default=min(per_token, default=0))
            total += per_token.get(nearest, 0.0) * len(plan.speculations()) * plan.max_tokens * unit.batch
        return total

    def missing(self, done: Sequence[Sample]) -> list[Unit]:
        """Units of which some speculation has no sample; such a unit is measured whole, to keep it interleaved."""
        have = {(s.dataset, s.batch, s.block, s.speculation) for s in done}
        names = self.plan.speculations()
        return [u for u in self.plan.units() if any((u.dataset, u.batch, u.block, n) not in have for n in names)]

    def run(self, file: SampleFile, watch: Watch, seconds: float | None = None) -> bool:
        """Measures missing units in order; False if `seconds` were up before the last. Units are never cut."""
        units = self.missing(file.samples)
        total, done, started = sum(self._costs[u.batch] for u in units), 0.0, time.monotonic()
        for number, unit in enumerate(units):
            cost = self._costs[unit.batch]
            pace = (time.monotonic() - started) / done if done else 1.0
            if seconds is not None and number and time.monotonic() - started + cost * pace > seconds:
                return False
            watch(
                Tick(
                    done,
                    total,
                    f"{unit.dataset}, batch {unit.batch}, block {unit.block + 1}/{self.plan.blocks(unit.batch)}",
                )
            )
            self._measure(unit, file)
            done += cost
        watch(Tick(total, total, "done"))
        return True

    def _measure(self, unit: Unit, file: SampleFile) -> None:
        prompts = dict(enumerate(self.prompts[unit.dataset]))
        for name in self.plan.order(unit):
            self.llm.set_speculation(name)
            file.add(
                sample(
                    self.llm.engine,
                    unit.dataset,
                    unit.batch,
                    unit.block,
                    name,
                    prompts,
                    unit.prompts,
                    self.plan.max_tokens,
                )
            )

    def _warm_up(self, batch: int) -> float:
        """Runs every configuration once on short prompts; returns the seconds one unit of this batch size will take."""
        every = [p for ids in self.prompts.values() for p in ids]
        mean = sum(map(len, every)) / len(every)
        prompts = [every[i % len(every)][:_WARMUP_PROMPT] for i in range(batch)]
        tokens = min(_WARMUP_TOKENS, self.plan.max_tokens)
        total = 0.0
        for name in self.plan.speculations():
            self.llm.set_speculation(name)
            run = decode(self.llm.engine, prompts, tokens)
            prefill = run.prefill_seconds * mean / (sum(map(len, prompts)) / batch)
            total += prefill + run.seconds * (self.plan.max_tokens - 1) / max(1, tokens - 1)
        return total
