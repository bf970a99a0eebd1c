"""The training loop: joint (trunk and drafter on text) or drafter alone on a frozen trunk; resumes where its directory stands."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from tokenizers import Tokenizer

from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.training.attention import IndexMode
from trtllm_v4tree.training.batches import RowBatches, encode_document, train_tokenizer
from trtllm_v4tree.training.documents import DataError, Document, read_documents
from trtllm_v4tree.training.experts import Gate
from trtllm_v4tree.training.export import check_against_transformers, export, load_model
from trtllm_v4tree.training.fusion import compile_fusible
from trtllm_v4tree.training.grow import grown
from trtllm_v4tree.training.losses import DraftPlan, Losses, distil_losses, joint_losses
from trtllm_v4tree.training.model import NanoModel
from trtllm_v4tree.training.optimizer import Optimizers
from trtllm_v4tree.training.options import Options
from trtllm_v4tree.training.report import Reporter
from trtllm_v4tree.training.state import RunDirectory, RunError, Standing, replace_text
from trtllm_v4tree.training.stopping import stop_requests

_DRAFT_WEIGHT = 0.3
_BALANCE_RATE = 1e-3
_DENSE_FROM, _SPARSE_FROM = 0.3, 0.6
_HELD_OUT_EVERY, _HELD_OUT_ROWS, _CHECKED_ROWS = 100, 16, 4
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class Run:
    """A model in training, with everything that belongs to it."""

    def __init__(self, options: Options, console: Console) -> None:
        self.options, self.console = options, console
        self.config = options.model_config()
        documents = load_data(options)
        self.directory = RunDirectory(options.output_dir)
        prepare_torch(options)
        self.tokenizer = self._tokenizer([document for document, _ in documents])
        self.model = new_model(options)
        self.optimizers = Optimizers(self.model, options.rates)
        self.batches, self.held_out = self._batches(documents)
        fresh = Standing(0, 0.0, options.identity())
        self.standing = self.directory.restore(self.model, self.optimizers, options.identity()) or fresh
        self.directory.write_plan(options.plan)
        self.reporter = Reporter(console, self.directory, options.report_steps)

    @property
    def checkpoint_dir(self) -> Path:
        return self.directory.path / "checkpoint"

    def train(self) -> None:
        """Runs to the end of the plan and saves, now and then and at the end; raises KeyboardInterrupt if it was stopped."""
        saved = self.standing.minutes
        with self.reporter, stop_requests() as stopped:
            for figures in self.steps():
                self.reporter.step(figures, self.standing, self.share_done())
                if stopped():
                    break
                if self.standing.minutes - saved > self.options.save_minutes:
                    saved = self.standing.minutes
                    self.save()
            self.save()
        if stopped():
            raise KeyboardInterrupt

    def steps(self) -> Iterator[dict[str, float]]:
        """Trains one step at a time until the plan is fulfilled; yields the step's losses."""
        self.model.train()
        clock = time.process_time()
        while (share := self.share_done()) < 1:
            step = self.standing.step
            losses = self._losses(self.batches.batch(step), step)
            self._objective(losses).backward()
            norm = self.optimizers.step(self.options.rates.factor(step, share))
            self._rebalance()
            used, clock = time.process_time() - clock, time.process_time()
            minutes = self.standing.minutes + used / 60 / self.options.threads
            self.standing = Standing(step + 1, minutes, self.standing.identity)
            yield {**losses.by_name(), "norm": norm}

    def save(self) -> None:
        """Training state, checkpoint, and the losses on the held-out rows."""
        self.directory.save(self.model, self.optimizers, self.standing)
        export(self.model, self.tokenizer, self.checkpoint_dir)
        self.reporter.held_out(self.evaluate(), self.standing)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean losses of the held-out rows, in the mode that training is in now."""
        self.model.eval()
        batches = self.held_out.split(self.options.batch_size)
        parts = [self._losses(rows, phase).by_name() for phase, rows in enumerate(batches)]
        self.model.train()
        return {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}

    def check(self) -> None:
        """Compares the exported trunk with transformers; raises ExportError if they differ."""
        found = check_against_transformers(self.checkpoint_dir, [row[:-1] for row in self.held_out[:_CHECKED_ROWS]])
        self.directory.log({"transformers": found._asdict()})
        self.console.print(
            f"trunk equals transformers: logits up to {found.largest:.1f} differ by at most {found.difference:.1e}, "
            f"argmax equal at {100 * found.equal:.2f} % of the positions of {found.rows} rows"
        )

    def share_done(self) -> float:
        """Share of the plan that is done; the plan may have been edited since the last step."""
        return self.directory.read_plan().progress(self.standing.step, self.standing.minutes)

    def _losses(self, rows: torch.Tensor, phase: int) -> Losses:
        plan = DraftPlan(self.options.mtp_steps)
        if self.options.freeze_trunk:
            return distil_losses(self.model, rows, plan, phase)
        return joint_losses(self.model, rows, plan, self._index_mode(), phase)

    def _index_mode(self) -> IndexMode:
        """Attention is dense at first; then the indexer learns what it looks at; in the end it looks at the choice only."""
        share = self.share_done()
        return "off" if share < _DENSE_FROM else "dense" if share < _SPARSE_FROM else "sparse"

    def _objective(self, losses: Losses) -> torch.Tensor:
        draft = torch.stack(losses.draft).mean()
        return draft if self.options.freeze_trunk else losses.trunk + _DRAFT_WEIGHT * draft + losses.indexer

    def _rebalance(self) -> None:
        for module in self.model.modules():
            if isinstance(module, Gate):
                module.rebalance(_BALANCE_RATE if module.weight.requires_grad else 0.0)

    def _tokenizer(self, documents: Sequence[Document]) -> Tokenizer:
        """That of the checkpoint that is started from, this run's own from before, or a new one."""
        file = (self.options.trained or self.directory.path) / "tokenizer.json"
        if self.options.trained is None and not file.exists():
            replace_text(file, train_tokenizer(documents, self.config.vocab_size).to_str())
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception
            raise RunError(f"{file} is no tokenizer ({error}): give a checkpoint directory with its own.") from error

    def _batches(self, documents: Sequence[tuple[Document, int]]) -> tuple[RowBatches, torch.Tensor]:
        """Endless training batches, and the held-out rows [rows, row_length], which are never trained on."""
        options = self.options
        encoded = [(encode_document(self.tokenizer, document), repeats) for document, repeats in documents]
        every = max(2, min(_HELD_OUT_EVERY, len(encoded) // 20))
        training = [ids for i, (ids, repeats) in enumerate(encoded) if i % every for _ in range(repeats)]
        held = RowBatches([ids for ids, _ in encoded[::every]], options.row_length, _HELD_OUT_ROWS, options.seed)
        return RowBatches(training, options.row_length, options.batch_size, options.seed), held.batch(0)


def run(options: Options, console: Console) -> Path:
    """Trains, exports and checks; returns the checkpoint directory."""
    job = Run(options, console)
    size = sum(p.numel() for p in job.model.parameters()) / 1e6
    console.print(
        f"{size:.1f} M parameters, from step {job.standing.step} on, rows of {options.seq_len} tokens, in {options.output_dir}"
    )
    job.train()
    job.check()
    return job.checkpoint_dir


def prepare_torch(options: Options) -> None:
    """Threads, compilation, and a heap that keeps big blocks instead of faulting every page in again."""
    torch.set_num_threads(options.threads)
    compile_fusible(options.compiled)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def load_data(options: Options) -> list[tuple[Document, int]]:
    """All documents, each with its file's repeats."""
    if not options.data:
        raise DataError("there is nothing to train on: give at least one --data file.")
    return [(d, repeats) for path, repeats in options.data for d in read_documents(path, options.strip)]


def new_model(options: Options) -> NanoModel:
    """Seeded weights, or those of the checkpoint that is started or grown from; a frozen trunk needs no gradient."""
    torch.manual_seed(options.seed)
    config = options.model_config()
    model = NanoModel(config)
    if options.start_from is not None:
        trained = load_model(options.start_from, config, options.start_mtp).state_dict()
        kept = {k: v for k, v in trained.items() if not (options.fresh_drafter and k.startswith("mtp."))}
        model.load_state_dict(kept, strict=False)
    if options.grow_from is not None:
        smaller = ModelConfig.from_pretrained(options.grow_from)
        model.load_state_dict(grown(load_model(options.grow_from, smaller).state_dict(), smaller, config))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("mtp.") or not options.freeze_trunk)
    model.compute = options.compute
    return model
