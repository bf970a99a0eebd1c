"""Which regularities of the paper hold in a set of results: one verdict with numbers for each. Pure functions of `Results`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from trtllm_v4tree.bench import paper
from trtllm_v4tree.bench.results import Cell, Gain, Results
from trtllm_v4tree.bench.stats import mean_of

HOLDS, PARTLY, FAILS, UNKNOWN = "holds", "holds in part", "does not hold", "not measured"
SMALL_BATCH, LARGE_BATCH = 8, 32
NEAR = 0.05
AIM = "aim of this project"


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper, its figure, ours, and whether the claim holds here."""

    claim: str
    published: str
    ours: str
    verdict: str


def verdicts(results: Results) -> list[Verdict]:
    """One verdict per regularity, in the order of the paper."""
    return [rule(results) for rule in _RULES]


def paragraph(results: Results) -> str:
    """Which regularities of the paper hold, in part or not, as running text; their numbers are in the table."""
    found = verdicts(results)
    of_paper = [v for v in found if v.published != AIM and v.verdict != UNKNOWN]
    held = sum(v.verdict == HOLDS for v in of_paper)
    sentences = [f"{held} of the {len(of_paper)} regularities of the paper that this grid can test hold here."]
    for start, verdict in (
        ("Holds", HOLDS),
        ("In part", PARTLY),
        ("Does not hold", FAILS),
        ("Not measured here", UNKNOWN),
    ):
        claims = [v.claim[0].lower() + v.claim[1:] for v in found if v.verdict == verdict]
        if claims:
            sentences.append(f"{start}: {'; '.join(claims)}.")
    return " ".join(sentences)


def mean_gain(results: Results, budget: int) -> float:
    return mean_of([g.gain.value for g in results.fixed_gains() if g.budget == budget])


def mean_ratio(results: Results, keep: Callable[[Cell], bool]) -> float:
    """Mean throughput of the fixed tree over the chain, over the cells to keep."""
    return mean_of([c.to_linear.value for c in results.fixed_cells() if c.to_linear and keep(c)])


def _more_accepted(results: Results) -> Verdict:
    claim, published = "A tree is accepted longer than a chain of the same budget", "in every cell"
    won = total = 0
    for cell in results.fixed_cells():
        chain = results.cell(cell.dataset, cell.batch, f"s{cell.budget - 1}_k1_d{cell.budget}")
        if chain is not None:
            total += 1
            won += cell.accepted_length.value > chain.accepted_length.value
    if not total:
        return Verdict(claim, published, "", UNKNOWN)
    return Verdict(claim, published, f"in {won} of {total} cells", _graded(won, total))


def _gain_grows(results: Results) -> Verdict:
    claim = "The gain in accepted length grows with D"
    published = " / ".join(f"{g:+.1%}" for g in paper.MEAN_GAIN.values()) + " at D = 5 / 6 / 7 / 8"
    gains = [mean_gain(results, d) for d in results.budgets]
    if len(gains) < 2 or not results.fixed_gains():
        return Verdict(claim, published, "", UNKNOWN)
    ours = " / ".join(f"{g:+.1%}" for g in gains) + f" at D = {' / '.join(map(str, results.budgets))}"
    rises = sum(b > a for a, b in itertools.pairwise(gains))
    return Verdict(claim, published, ours, _graded(rises, len(gains) - 1))


def _accepted_at_8(results: Results) -> Verdict:
    claim = "At D=8 the accepted length rises by about a fifth on each of the three sets"
    published = ", ".join(f"{name} {a} to {b} ({b / a - 1:+.1%})" for name, (a, b) in paper.ACCEPTED_D8.items())
    gains = [g for g in results.fixed_gains() if g.budget == 8]
    if not gains:
        return Verdict(claim, published, "", UNKNOWN)
    ours = ", ".join(
        f"{g.dataset} {g.linear.value:.3f} to {g.tree.value:.3f} ({g.gain.value:+.1%}{_interval(g)})" for g in gains
    )
    return Verdict(claim, published, ours, _graded(sum(g.gain.value >= 0.15 for g in gains), len(gains)))


def _break_even(results: Results) -> Verdict:
    claim, published = "Throughput is near break-even at D=5", "tree/linear about 1"
    if 5 not in results.budgets:
        return Verdict(claim, published, "", UNKNOWN)
    ratio = mean_ratio(results, lambda c: c.budget == 5)
    return Verdict(claim, published, f"mean tree/linear {ratio:.3f}", HOLDS if abs(ratio - 1) <= NEAR else FAILS)


def _pays_from_6(results: Results) -> Verdict:
    claim, published = "From D=6 a tree is 8 to 10 % faster than a chain", "tree/linear 1.08 to 1.10"
    budgets = [d for d in results.budgets if d >= 6]
    ratios = [mean_ratio(results, lambda c, d=d: c.budget == d) for d in budgets]  # type: ignore[misc]
    if not budgets or any(r != r for r in ratios):
        return Verdict(claim, published, "", UNKNOWN)
    cells = [c for c in results.fixed_cells() if c.to_linear]
    won = sum(c.to_linear.value >= 1 for c in cells if c.to_linear)
    means = ", ".join(f"{r:.3f} at D={d}" for d, r in zip(budgets, ratios, strict=True))
    ours = f"mean tree/linear {means}; at least 1 in {won} of {len(cells)} cells"
    return Verdict(claim, published, ours, _graded(sum(r >= paper.THROUGHPUT_FROM_D6[0] for r in ratios), len(ratios)))


def _best_cell(results: Results) -> Verdict:
    claim, published = "The best cell gains 18.5 % or more", f"1.185 ({paper.BEST_CELL})"
    cells = [c for c in results.cells if c.kind == "tree" and c.to_linear]
    if not cells:
        return Verdict(claim, published, "", UNKNOWN)
    best = max(cells, key=lambda c: c.to_linear.value if c.to_linear else 0.0)
    fixed = max(results.fixed_cells(), key=lambda c: c.to_linear.value if c.to_linear else 0.0)
    assert best.to_linear and fixed.to_linear
    ours = f"fixed shapes {fixed.to_linear.value:.3f} ({_name(fixed)}); of all shapes {best.to_linear.value:.3f} ({_name(best)})"
    return Verdict(claim, published, ours, HOLDS if fixed.to_linear.value >= paper.BEST_THROUGHPUT else FAILS)


def _plateau(results: Results) -> Verdict:
    claim = "Throughput reaches a plateau past D of 6 to 7 while accepted length still rises"
    published = "plateau at 6 to 7"
    fixed = {d: [c for c in results.fixed_cells() if c.budget == d] for d in results.budgets}
    if not all(fixed.values()) or max(results.budgets) <= 6 or len(results.budgets) < 3:
        return Verdict(claim, published, "", UNKNOWN)
    speed = {d: mean_of([c.to_plain.value for c in cells if c.to_plain]) for d, cells in fixed.items()}
    accepted = {d: mean_of([c.accepted_length.value for c in cells]) for d, cells in fixed.items()}
    best, last = max(speed, key=lambda d: speed[d]), max(results.budgets)
    middle = min(results.budgets, key=lambda d: abs(d - 6))
    ours = (
        f"tree/plain peaks at D={best}; from D={middle} to {last} accepted length {accepted[last] / accepted[middle] - 1:+.1%}, "
        f"throughput {speed[last] / speed[middle] - 1:+.1%}"
    )
    longer, faster = accepted[last] / accepted[middle] - 1, speed[last] / speed[middle] - 1
    rises, flat = longer > 0, -NEAR <= faster < longer / 2
    return Verdict(
        claim, published, ours, HOLDS if rises and flat else PARTLY if rises and faster < longer / 2 else FAILS
    )


def _small_batches(results: Results) -> Verdict:
    claim, published = "A tree gains the most at small to medium batch", "best at batch 4"
    small = mean_ratio(results, lambda c: c.batch <= SMALL_BATCH)
    large = mean_ratio(results, lambda c: c.batch >= LARGE_BATCH)
    if small != small or large != large:
        return Verdict(claim, published, "", UNKNOWN)
    ours = f"mean tree/linear {small:.3f} up to batch {SMALL_BATCH}, {large:.3f} from batch {LARGE_BATCH}"
    return Verdict(claim, published, ours, HOLDS if small > large else FAILS)


def _less_predictable(results: Results) -> Verdict:
    claim, published = "A tree gains the most in throughput on the least predictable text", "best cell on sharegpt"
    gains: dict[str, list[Gain]] = {d: [g for g in results.fixed_gains() if g.dataset == d] for d in results.datasets}
    if len(gains) < 2 or not all(gains.values()):
        return Verdict(claim, published, "", UNKNOWN)
    predictable = {d: mean_of([g.linear.value for g in found]) for d, found in gains.items()}
    ratio = {d: mean_ratio(results, lambda c, d=d: c.dataset == d) for d in gains}  # type: ignore[misc]
    hardest, best = min(predictable, key=lambda d: predictable[d]), max(ratio, key=lambda d: ratio[d])
    each = ", ".join(
        f"{d} (chain accepts {predictable[d]:.2f}) {ratio[d]:.3f}" for d in sorted(gains, key=lambda d: predictable[d])
    )
    return Verdict(claim, published, f"mean tree/linear {each}", HOLDS if hardest == best else FAILS)


def _independent_of_batch(results: Results) -> Verdict:
    claim, published = "Accepted length does not depend on the batch", "the same at every batch size"
    move = results.batch_spread
    if move is None:
        return Verdict(claim, published, "", UNKNOWN)
    ours = f"over the same prompts it moves by at most {move:.3f} from batch {results.batch_sizes[0]} to {results.batch_sizes[-1]}"
    return Verdict(claim, published, ours, HOLDS if move < 0.05 else FAILS)


def _plain_at_batch_1(results: Results) -> Verdict:
    claim, published = "At batch 1 a tree decodes at least 1.5 times as fast as plain decoding", AIM
    cells = [c for c in results.fixed_cells() if c.batch == 1 and c.to_plain]
    if not cells:
        return Verdict(claim, published, "", UNKNOWN)
    ratios = [c.to_plain.value for c in cells if c.to_plain]
    ours = f"tree/plain {min(ratios):.2f} to {max(ratios):.2f}, mean {mean_of(ratios):.2f}"
    return Verdict(claim, published, ours, _graded(sum(r >= 1.5 for r in ratios), len(ratios)))


_RULES = (
    _more_accepted,
    _gain_grows,
    _accepted_at_8,
    _break_even,
    _pays_from_6,
    _best_cell,
    _plateau,
    _small_batches,
    _less_predictable,
    _independent_of_batch,
    _plain_at_batch_1,
)


def why(results: Results) -> str:
    """What a round costs here against one plain step, measured: the reason where throughput differs from the paper's."""
    parts = []
    for batch in dict.fromkeys((results.batch_sizes[0], results.batch_sizes[-1])) if results.batch_sizes else ():
        costs = [c for c in map(lambda c: _cost(results, c), results.fixed_cells()) if c and c[0] == batch]
        if not costs:
            continue
        budget = max(c[1] for c in costs)
        at = [c for c in costs if c[1] == budget]
        whole, verify, draft = (mean_of([c[i] for c in at]) for i in (2, 3, 4))
        parts.append(
            f"at batch {batch} a round of the D={budget} tree takes {whole:.2f} times a plain step "
            f"(verifying {verify:.2f}, drafting {draft:.2f}), so it pays from an accepted length of {whole:.2f} on"
        )
    if not parts:
        return ""
    return (
        "What a round costs here, measured: "
        + "; ".join(parts)
        + ". On an accelerator that is bound by reading weights, verifying "
        "D nodes costs little more than one; on a CPU every node adds arithmetic, the more so the larger the batch."
    )


def _cost(results: Results, cell: Cell) -> tuple[int, int, float, float, float] | None:
    """(batch, budget, round, verify, draft), the last three in plain steps."""
    plain = results.cell(cell.dataset, cell.batch, "none")
    if plain is None:
        return None
    step = plain.round_ms.value
    return (
        cell.batch,
        cell.budget,
        cell.round_ms.value / step,
        cell.phases["verify"] / step,
        cell.phases["draft"] / step,
    )


def _graded(count: int, total: int) -> str:
    return HOLDS if count == total else PARTLY if count >= total / 2 else FAILS


def _interval(gain: Gain) -> str:
    return f", 95 % {gain.gain.low:+.1%} to {gain.gain.high:+.1%}" if gain.gain.has_interval else ""


def _name(cell: Cell) -> str:
    return f"{cell.dataset}, {cell.speculation}, batch {cell.batch}"
