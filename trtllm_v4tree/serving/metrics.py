"""The engine thread's statistics on Triton's own /metrics, through its custom-metric API."""

from __future__ import annotations

import threading
from typing import Any

from trtllm_v4tree.serving.logs import log
from trtllm_v4tree.serving.stats import Stats

PERIOD_S = 0.5

COUNTERS = {
    "requests": "Requests accepted by the scheduler",
    "finished": "Requests that ended with a result",
    "cancelled": "Requests cancelled by their client",
    "refused": "Requests refused as invalid or for lack of room in the queue",
    "failed": "Requests ended by a fault of the engine or by shutdown",
    "deadline_exceeded": "Requests that ran out of time",
    "engine_faults": "Passes that raised",
    "prompt_tokens": "Prompt tokens of accepted requests",
    "emitted_tokens": "Tokens emitted to clients",
    "rounds": "Verify passes, counted per request",
    "round_tokens": "Tokens emitted by verify passes, bonus tokens included",
}
GAUGES = {
    "ready": "1 while new requests are taken",
    "slots_active": "Sequences being prefilled or decoded",
    "slots_free": "Free sequence slots",
    "queue_depth": "Requests that wait for a slot or pages",
    "pages_used": "Entry pages in use",
    "pages_free": "Free entry pages",
    "scratch_bytes": "Scratch of a verify pass of the active sequences",
}


class Exporter:
    """Copies `stats` into Triton's registry every PERIOD_S until `close`."""

    def __init__(self, pb: Any, stats: Stats) -> None:
        self._pb, self._stats = pb, stats
        self._families: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}
        for name, text in COUNTERS.items():
            self._metrics[name] = self._family(f"v4tree_{name}_total", text, counter=True).Metric(labels={})
        for name, text in GAUGES.items():
            self._metrics[name] = self._family(f"v4tree_{name}", text, counter=False).Metric(labels={})
        self._accepted_length = self._family(
            "v4tree_accepted_length", "Tokens emitted per verify pass since the start", False
        ).Metric(labels={})
        self._by_depth = self._family(
            "v4tree_accepted_depth_total", "Verify passes that emitted a token at this depth", True
        )
        self._depths: list[Any] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="v4tree-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the copying and gives the metrics back to Triton; to be called from `finalize`.

        Metrics that are still referred to when the stub process tears down crash it (triton-inference-server/server issue 8662): their
        destructors ask a stub that is gone.
        """
        self._stop.set()
        self._thread.join(timeout=5.0)
        if self._thread.is_alive():
            return  # it uses them
        self._metrics.clear()
        self._depths.clear()
        del self._accepted_length, self._by_depth
        self._families.clear()

    def _family(self, name: str, text: str, counter: bool) -> Any:
        kind = self._pb.MetricFamily.COUNTER if counter else self._pb.MetricFamily.GAUGE
        family = self._pb.MetricFamily(name=name, description=text, kind=kind)
        self._families[name] = family
        return family

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            try:
                self._copy()
            except Exception:
                log("metrics_failed", exc_info=True)
                return

    def _copy(self) -> None:
        stats = self._stats
        for name in COUNTERS:
            _raise_to(self._metrics[name], getattr(stats, name))
        for name in GAUGES:
            self._metrics[name].set(getattr(stats, name))
        self._accepted_length.set(stats.round_tokens / stats.rounds if stats.rounds else 0.0)
        for depth, count in enumerate(list(stats.accepted_by_depth)):
            if depth == len(self._depths):
                self._depths.append(self._by_depth.Metric(labels={"depth": str(depth + 1)}))
            _raise_to(self._depths[depth], count)


def _raise_to(counter: Any, value: float) -> None:
    """Triton's counters only grow."""
    behind = value - counter.value()
    if behind > 0:
        counter.increment(behind)
