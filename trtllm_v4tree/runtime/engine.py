"""The round loop: in-flight batching over slots, prefill in chunks beside decoding, draft -> verify -> accept -> finish -> commit.

`Engine.step` runs one scheduler step and returns what it emitted. Everything that outlives a step is in the executor's pools, in
`_Slots` (arrays by slot) and in the requests.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.errors import RequestError
from trtllm_v4tree.runtime.accept import Walk, walk, walk_lazily
from trtllm_v4tree.runtime.bad_words import BadWords, Encode
from trtllm_v4tree.runtime.chunks import Chunks
from trtllm_v4tree.runtime.clock import PhaseClock
from trtllm_v4tree.runtime.detokenize import Decoder
from trtllm_v4tree.runtime.executor import DraftResult, Executor, StepResult
from trtllm_v4tree.runtime.finish import FinishRules
from trtllm_v4tree.runtime.latency import LatencyTable
from trtllm_v4tree.runtime.native_tables import make_tables
from trtllm_v4tree.runtime.params import SamplingParams
from trtllm_v4tree.runtime.policies.base import Candidates, Policy
from trtllm_v4tree.runtime.policies.names import make_policy
from trtllm_v4tree.runtime.pools import Pools
from trtllm_v4tree.runtime.request import Delta, Phase, Request
from trtllm_v4tree.runtime.sampling import (
    TokenLogprobs,
    apply_penalties,
    choose_tokens,
    is_certain,
    needs_logit_edits,
    top_logprobs,
)
from trtllm_v4tree.runtime.tables import Feeds, Sequences, StepTables, Tree, every_node
from trtllm_v4tree.runtime.tree import PAD, ROOT, Ints, select_nodes
from trtllm_v4tree.sizes import EngineSizes


class _Slots:
    """What the host knows of each slot: committed length, newest token (the next root), pages, and the tokens that follow the
    accepted rows which the drafter has not read."""

    def __init__(self, sizes: EngineSizes) -> None:
        n, self.most_unread = sizes.num_slots, sizes.max_commit
        self.length, self.root = [0] * n, [0] * n
        self.pages = np.zeros((n, sizes.pages_per_seq), np.int64)
        self.unread: list[list[int]] = [[] for _ in range(n)]

    def admit(self, slot: int, pages: Sequence[int]) -> None:
        self.length[slot] = self.root[slot] = 0
        self.unread[slot] = []
        self.pages[slot] = 0
        self.pages[slot, : len(pages)] = pages

    def sequences(self, slots: list[int]) -> Sequences:
        return Sequences(slots, [self.length[s] for s in slots], self.pages.take(slots, axis=0))

    def commit(self, slot: int, following: list[int]) -> None:
        """Takes down that rows were committed, each by the token that follows it."""
        self.length[slot] += len(following)
        self.unread[slot] = (self.unread[slot] + following)[-self.most_unread :]
        self.root[slot] = following[-1] if following else self.root[slot]


class _Drafted(NamedTuple):
    """A draft round's result and what it adds to the tables of the next commit."""

    result: DraftResult
    tables: Feeds


class _Proposal(NamedTuple):
    """The tree of a round; candidates and kept [B][N] (candidate of each node) where a draft round chose it."""

    tree: Tree
    drafted: _Drafted | None
    candidates: Candidates | None = None
    kept: list[list[int]] | None = None


class Engine:
    """Scheduler and round loop over one executor. Not thread-safe: one thread submits and steps.

    With `deterministic` the token ids are the same whatever the batch and the speculation. An executor that is not exact to the bit
    pays for it: a choice that rounding could have changed is made again by a prefill of the sequence alone from its first token, a
    pass that is always the same.
    """

    def __init__(
        self,
        executor: Executor,
        speculation: str = "none",
        decoder: Decoder | None = None,
        max_queue: int = 4096,
        deterministic: bool = False,
        latency: LatencyTable | None = None,
        encode: Encode | None = None,
        max_num_tokens: int = 0,
    ) -> None:
        self.executor, self.sizes, self.config = executor, executor.sizes, executor.config
        self.decoder, self.max_queue = decoder, max_queue
        self.deterministic = deterministic and not executor.bit_exact
        self.latency, self.encode = latency, encode
        self._queue: deque[Request] = deque()
        self._active: list[Request] = []
        self.clock = PhaseClock()
        self._overtaking = False
        self.chunks = Chunks(self.sizes.prefill_chunk, max_num_tokens)
        self._policies: dict[str, Policy | None] = {}
        self.set_speculation(speculation)
        self.pools = Pools(self.sizes)
        self.observer: Callable[[Tree, Walk], None] | None = None
        self._slots, self._tables = _Slots(self.sizes), make_tables(self.sizes)
        self._in_pass: list[Request] = []
        self._ids = itertools.count()

    def set_speculation(self, name: str) -> None:
        """Chooses how to draft (a name of `make_policy`) and loads the graphs; only while idle. A policy keeps what it has learnt."""
        assert self.idle, "speculation changes only between generations"
        if name not in self._policies:
            made = make_policy(name, self.sizes, self.executor.draft_shapes, self.latency, self.clock.seconds)
            self._policies[name] = made
        policy = self._policies[name]
        if policy is not None:
            for steps, topk in ((0, 1), *policy.shapes):
                self.executor.prepare_draft(steps, topk)
        self.policy = policy

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None) -> Request:
        """Queues a request; raises RequestError for one that this engine can never serve."""
        ids = check_prompt(prompt_ids, self.config.vocab_size)
        rules = FinishRules.of(params, self.config.eos_token_ids, len(ids), self.sizes.max_seq_len)
        if rules.stop and self.decoder is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none: use stop_token_ids.")
        bad_words = BadWords.of(params, self.encode, self.config.vocab_size, self.config.eos_token_ids)
        request = Request(request_id or f"r{next(self._ids)}", ids, params, rules, self.decoder, bad_words)
        need = self.pools.pages_for(request.tokens_reserved)
        if need > self.sizes.num_pages - 1:
            raise RequestError(
                f"the request needs {need} pages for {request.tokens_reserved} tokens and the engine has {self.sizes.num_pages - 1}: "
                "lower max_tokens or build with more --num_pages."
            )
        if len(self._queue) >= self.max_queue:
            raise RequestError(f"the queue is full ({self.max_queue} requests wait): try again later.")
        self._queue.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request in any phase; its slot and pages are free before the next pass."""
        request.cancelled = True

    def abort_pass(self) -> list[Request]:
        """After `step` raised: ends the requests of the pass that failed, frees their slots and pages, and returns them."""
        failed, self._in_pass = self._in_pass, []
        for request in failed:
            request.finish("error")
        self._release_finished()
        return failed

    @property
    def idle(self) -> bool:
        return not self._queue and not self._active

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_active(self) -> int:
        return len(self._active)

    def step(self, decode: bool = True) -> list[Delta]:
        """One scheduler step: drop what was cancelled, admit, one prefill pass, one decode round unless that is to wait."""
        self.clock.start()
        deltas = self._drop_cancelled()
        self._admit()
        prefilling = [r for r in self._active if r.phase is Phase.PREFILL]
        if prefilling:
            chunk = self._chunk()
            self._in_pass = self._chunk_batch(prefilling, chunk)
            deltas += self._prefill(self._in_pass, chunk)
        decoding = [r for r in self._active if decode and r.phase is Phase.DECODE]
        if decoding:
            self._in_pass = decoding
            deltas += self._decode(decoding)
        self._in_pass = []
        self._release_finished()
        self.clock.mark("host")
        return deltas

    # ---------------------------------------------------------------- admission

    def _drop_cancelled(self) -> list[Delta]:
        dropped = [r for r in (*self._queue, *self._active) if r.cancelled]
        for request in dropped:
            request.finish("cancelled")
        if dropped:
            self._queue = deque(r for r in self._queue if not r.cancelled)
            self._release_finished()
        return [Delta(r, [], r.finish_reason) for r in dropped]

    def _admit(self) -> None:
        """First come, first served: a request that does not fit now holds back those behind it."""
        while self._queue and self.pools.can_admit(self._queue[0].tokens_reserved):
            request = self._queue.popleft()
            request.slot, request.pages = self.pools.admit(request.tokens_reserved)
            self._slots.admit(request.slot, request.pages)
            self.executor.reset(request.slot)
            request.phase = Phase.PREFILL
            self._active.append(request)

    def _release_finished(self) -> None:
        for request in [r for r in self._active if r.phase is Phase.FINISHED]:
            self._active.remove(request)
            self.pools.release(request.slot, request.pages)

    # ---------------------------------------------------------------- prefill

    def _chunk(self) -> int:
        """Prompt tokens of the next prefill pass; in deterministic mode always the same."""
        decoding = sum(r.phase is Phase.DECODE for r in self._active)
        if self.deterministic:
            return self.sizes.prefill_chunk
        return self.chunks.tokens(decoding, 1 if self.policy is None else self.policy.max_nodes)

    def _chunk_batch(self, prefilling: list[Request], chunk: int) -> list[Request]:
        """As many prompts as fill one chunk of tokens, padding included; at least one, and in deterministic mode no more."""
        waiting = self._in_turn(prefilling, chunk)
        if self.deterministic:
            return waiting[:1]
        batch: list[Request] = []
        width = 0
        for request in waiting:
            width = max(width, min(request.prefill_left, chunk))
            if batch and (len(batch) + 1) * width > chunk:
                break
            batch.append(request)
        return batch

    def _in_turn(self, prefilling: list[Request], chunk: int) -> list[Request]:
        """First come, first served; in every other pass the prompts that it would complete overtake longer ones."""
        self._overtaking = not self._overtaking
        return sorted(prefilling, key=lambda r: r.prefill_left > chunk) if self._overtaking else prefilling

    def _prefill(self, batch: list[Request], chunk: int) -> list[Delta]:
        """At most `chunk` tokens of each prompt: a chain that is accepted whole."""
        began = self.clock.total_ms
        parts = [r.prefill_ids[r.prefilled : r.prefilled + chunk] for r in batch]
        slots = [r.slot for r in batch]
        drafted = self._catch_up(slots)
        width = max(map(len, parts))
        tree = Tree.make(
            [[*range(-1, len(part) - 1), *[PAD] * (width - len(part))] for part in parts],
            [[*part, *[0] * (width - len(part))] for part in parts],
        )
        last = np.array([[len(part) - 1] for part in parts], np.int64)
        step = self._tables.step(self._slots.sequences(slots), tree, last)
        self.clock.mark("host")
        result = self.executor.target(step.feeds)
        self.clock.mark("prefill")
        deltas, following = self._first_tokens(batch, parts, result)
        paths = [list(range(len(part))) for part in parts]
        runs = [[*part[1:], token] for part, token in zip(parts, following, strict=True)]
        self._commit(step, result, paths, runs, drafted)
        for request, part in zip(batch, parts, strict=True):
            request.prefilled += len(part)
        self.chunks.prefill.add(len(batch) * width, self.clock.total_ms - began)
        return deltas

    def _first_tokens(
        self, batch: list[Request], parts: list[list[int]], result: StepResult
    ) -> tuple[list[Delta], list[int]]:
        """The token after each chunk: the prompt's own, or for the last chunk the first one generated."""
        deltas, following = [], []
        for row, request in enumerate(batch):
            end = request.prefilled + len(parts[row])
            if end < len(request.prefill_ids):
                following.append(request.prefill_ids[end])
                continue
            logits = result.logits[row]
            token = int(self._choose([request], logits, np.array([end]), [[]])[0][0])
            following.append(token)
            request.phase = Phase.DECODE
            deltas.append(request.accept([token], self._logprobs(request, logits, [token])))
        return deltas, following

    def _loses_rows(self, slots: list[int]) -> bool:
        """Whether one more row would push out an unread one that the drafter's window still holds."""
        most = self.sizes.max_commit
        return most < self.sizes.window and any(len(self._slots.unread[s]) >= most for s in slots)

    def _catch_up(self, slots: list[int]) -> _Drafted | None:
        """Lets the drafter read rows committed earlier, before a pass that overwrites them or has no room for more."""
        if self.policy is None or not any(self._slots.unread[s] for s in slots):
            return None
        return self._draft(slots, 0, 1)

    # ---------------------------------------------------------------- decode

    def _decode(self, batch: list[Request]) -> list[Delta]:
        began, slots = self.clock.total_ms, [r.slot for r in batch]
        proposal = self._propose(batch, slots)
        tree = proposal.tree
        step = self._tables.step(self._slots.sequences(slots), tree, every_node(len(batch), tree.nodes))
        self.clock.mark("host")
        result = self.executor.target(step.feeds)
        self.clock.mark("verify")
        visited = self._accept(batch, step, result)
        if self.observer is not None:
            self.observer(tree, visited)
        if self.policy is not None and proposal.candidates is not None and proposal.kept is not None:
            self.policy.observe(proposal.candidates, proposal.kept, visited)
        deltas = self._finish(batch, visited, result)
        self.clock.mark("accept")
        self._commit(step, result, visited.paths, [d.token_ids for d in deltas], proposal.drafted)
        self.chunks.decode.add(len(batch), self.clock.total_ms - began)
        if self.deterministic:
            self._restart_undecided(batch, visited)
        return deltas

    def _restart_undecided(self, batch: list[Request], visited: Walk) -> None:
        for request, path, run in zip(batch, visited.paths, visited.runs, strict=True):
            if request.phase is Phase.DECODE and len(run) < len(path):
                self._slots.admit(request.slot, request.pages)
                self.executor.reset(request.slot)
                request.restart()

    def _propose(self, batch: list[Request], slots: list[int]) -> _Proposal:
        """The tree to verify: the best nodes of a draft round, or the root alone where drafting is off or does not pay."""
        roots = [self._slots.root[s] for s in slots]
        shape = None if self.policy is None else self.policy.shape(len(batch))
        if self.policy is None or shape is None:
            drafted = self._catch_up(slots) if self._loses_rows(slots) else None
            return _Proposal(Tree.make([[ROOT]] * len(batch), [[root] for root in roots]), drafted)
        drafted = self._draft(slots, *shape)
        result = drafted.result
        candidates = Candidates(result.parents, result.tokens, result.scores)
        choice = self.policy.choose(candidates, np.array([r.room for r in batch], np.int64))
        selected = select_nodes(choice.scores, result.parents, result.tokens, choice.budgets, roots)
        return _Proposal(Tree.make(selected.parents, selected.tokens), drafted, candidates, selected.candidates)

    def _draft(self, slots: list[int], steps: int, topk: int) -> _Drafted:
        unread = [self._slots.unread[s] for s in slots]
        feeds, tables = self._tables.draft(self._slots.sequences(slots), [len(u) for u in unread], unread, steps)
        self.clock.mark("host")
        result = self.executor.draft(steps, topk, feeds)
        self.clock.mark("draft")
        return _Drafted(result, tables)

    def _accept(self, batch: list[Request], step: StepTables, result: StepResult) -> Walk:
        """Which nodes the target's own tokens follow. A choice that must be made again ends a walk without a token."""
        parents, tokens = [shape.parents for shape in step.tree.shapes], step.tree.tokens
        if not self.deterministic and all(
            r.params.is_greedy and not needs_logit_edits(r.params, len(r.output_ids)) for r in batch
        ):
            return walk(parents, tokens, result.logits.argmax(axis=2).tolist())
        prefix: list[list[int]] = [[] for _ in batch]

        def choose(rows: list[int], nodes: list[int]) -> list[int | None]:
            requests, before = [batch[b] for b in rows], [prefix[b] for b in rows]
            positions = step.positions[rows, nodes] + 1
            chosen, certain = self._choose(requests, result.logits[rows, nodes], positions, before)
            for own, token in zip(before, chosen.tolist(), strict=True):
                own.append(token)
            return [t if stands else None for t, stands in zip(chosen.tolist(), certain.tolist(), strict=True)]

        return walk_lazily(parents, tokens, choose)

    def _choose(
        self, requests: list[Request], logits: NDArray[np.float32], positions: Ints, prefixes: list[list[int]]
    ) -> tuple[Ints, NDArray[np.bool_]]:
        """The target's own token of each row and whether it stands; `prefixes` are the tokens emitted in this walk before it."""
        edited = self._edit(requests, logits, prefixes)
        p = [r.params for r in requests]
        keyed = (
            [x.temperature for x in p],
            [x.top_k for x in p],
            [x.top_p for x in p],
            [x.min_p for x in p],
            [r.seed for r in requests],
            positions,
        )
        chosen = choose_tokens(edited, *keyed)
        certain = is_certain(edited, chosen, *keyed) if self.deterministic else np.ones(len(chosen), bool)
        return chosen, certain

    def _edit(
        self, requests: list[Request], logits: NDArray[np.float32], prefixes: list[list[int]]
    ) -> NDArray[np.float32]:
        """Penalties, min_tokens and bad words of each row's request, on a copy if there are any."""
        edited = logits
        for row, request in enumerate(requests):
            p = request.params
            if needs_logit_edits(p, len(request.output_ids) + len(prefixes[row])):
                edited = logits.copy() if edited is logits else edited
                rows, past = edited[row : row + 1], (request.prompt_ids, request.output_ids, [prefixes[row]])
                apply_penalties(rows, *past, p, self.config.eos_token_ids, request.bad_words)
        return edited

    def _finish(self, batch: list[Request], visited: Walk, result: StepResult) -> list[Delta]:
        """Finish rules before the commit: the tokens of a delta say how many nodes of its path to keep."""
        deltas = []
        for row, (request, path, run) in enumerate(zip(batch, visited.paths, visited.runs, strict=True)):
            wanted = request.params.logprobs is not None
            logprobs = self._logprobs(request, result.logits[row, path[: len(run)]], run) if wanted else []
            delta = request.accept(run, logprobs)
            request.metrics.count(len(delta.token_ids))
            deltas.append(delta)
        return deltas

    def _logprobs(self, request: Request, logits: NDArray[np.float32], run: list[int]) -> list[TokenLogprobs]:
        n = request.params.logprobs
        return [] if n is None else [top_logprobs(row, token, n) for row, token in zip(logits, run, strict=True)]

    def _commit(
        self,
        step: StepTables,
        result: StepResult,
        paths: list[list[int]],
        runs: list[list[int]],
        drafted: _Drafted | None,
    ) -> None:
        """Commits as many nodes of each path as its run has tokens: the token that follows each node."""
        slots = [int(s) for s in step.seqs.slots]
        if drafted is not None or self.policy is None:
            for slot in slots:
                self._slots.unread[slot] = []
        feeds = self._tables.commit(step, paths, [len(run) for run in runs])
        if drafted is not None:
            feeds.update(drafted.tables)
        self.clock.mark("host")
        self.executor.commit(result.scratch, drafted and drafted.result.scratch, feeds)
        for slot, run in zip(slots, runs, strict=True):
            self._slots.commit(slot, run)
        self.clock.mark("commit")


def check_prompt(prompt_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Plain list of valid token ids; RequestError names the first bad one."""
    ids = list(prompt_ids)
    if not ids:
        raise RequestError("the prompt is empty: give at least one token.")
    for index, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
            raise RequestError(f"prompt token {index} is {token!r}: token ids are integers from 0 to {vocab_size - 1}.")
    return [int(t) for t in ids]
