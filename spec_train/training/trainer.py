"""The training loop: plain on purpose, on Accelerate, resumable to the bit.

Every optimiser step is a function of (weights, optimiser state, step): the data order, the learning rate and the
random seeds follow from the step alone. The loss is a sum over the supervised tokens of the whole step (all
micro-batches of all processes) divided by their number, so accumulation and data parallelism change nothing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from rich.console import Console
from torch import Tensor

from spec_train.batch import Batch
from spec_train.data.batches import Rows, build_batch, plan_epoch
from spec_train.errors import RunFailure, UserError
from spec_train.manifest import atomic_write_json
from spec_train.speculators.base import ResponseHits, Speculator
from spec_train.training import checkpoint as ckpt
from spec_train.training import parallel
from spec_train.training.figures import SampledAnswers, Totals, peak_memory, reduced_estimates
from spec_train.training.run_log import Clock, RunLog
from spec_train.training.schedule import learning_rate_scale
from spec_train.training.trackers import check_trackers

if TYPE_CHECKING:
    from spec_train.data.documents import Document
    from spec_train.recipe import OptimSection, TrainSection

Provider = Callable[[Batch], Batch]  # adds hidden states to a batch that is on the device
Decode = Callable[[Path], dict[str, float]]  # figures of a real decode with the speculator of a checkpoint directory


class NonFiniteError(RunFailure):
    """Loss or gradients became NaN or infinite. Names the step and the documents; earlier checkpoints stand."""


@dataclass(frozen=True)
class TrainResult:
    """What a finished run leaves: the checkpoints to use, and what it cost. `peak_memory` in bytes: of the GPU, or of
    the process on the CPU. `best_value` is None where there was nothing to choose on; `start_value` is the same metric
    of the trained head that training went on from, None for a fresh one. `smallest_step_tokens` and
    `largest_step_tokens`: supervised tokens of optimiser steps, over one epoch."""

    steps: int
    best_checkpoint: str
    last_checkpoint: str
    best_metric: str
    best_value: float | None
    start_value: float | None
    trained_tokens: int
    seconds: float
    peak_memory: int
    smallest_step_tokens: int
    largest_step_tokens: int


@dataclass(frozen=True)
class StepPlan:
    """Which micro-batches make up each optimiser step: a pure function of the step."""

    lengths: tuple[int, ...]
    supervised: tuple[int, ...]  # tokens of each document that count
    micro_batch_tokens: int
    seed: int
    per_step: int  # grad_accum_steps x processes

    def epoch(self, epoch: int) -> list[list[Rows]]:
        """The optimiser steps of one epoch, each a list of `per_step` micro-batches."""
        return plan_epoch(
            self.lengths,
            self.supervised,
            micro_batch_tokens=self.micro_batch_tokens,
            seed=self.seed,
            epoch=epoch,
            per_step=self.per_step,
        )

    def step_tokens(self) -> list[int]:
        """Supervised tokens of each optimiser step of the first epoch."""
        return [sum(self.supervised[index] for rows in step for row in rows for index in row) for step in self.epoch(0)]

    def total_steps(self, epochs: int, max_steps: int | None) -> int:
        """`max_steps` where given (passing over the data as often as that takes), else what `epochs` passes need."""
        return max_steps if max_steps is not None else sum(len(self.epoch(epoch)) for epoch in range(epochs))

    def steps(self, start: int, total: int) -> Iterator[tuple[int, list[Rows]]]:
        """(epoch, micro-batches) of the optimiser steps `start` .. `total` - 1."""
        first, epoch = 0, 0
        while first < total:
            steps = self.epoch(epoch)
            for index in range(max(0, start - first), min(len(steps), total - first)):
                yield epoch, steps[index]
            first, epoch = first + len(steps), epoch + 1


def train(
    speculator: Speculator,
    documents: Sequence[Document],
    validation: Sequence[Document],
    provider: Provider,
    *,
    optim: OptimSection,
    train: TrainSection,
    seed: int,
    device: Literal["auto", "cpu", "cuda"],
    num_draft_tokens: Sequence[int],
    output_dir: Path,
    speculator_config: Mapping[str, Any],
    run_config: Mapping[str, Any],
    evaluate_start: bool = False,
    decode: Decode | None = None,
    sampled: SampledAnswers | None = None,
) -> TrainResult:
    """Train `speculator` in place, or resume where an earlier call with the same `output_dir` stopped.

    speculator         fresh from `from_target`, on any device; trainable parameters in float32
    documents          at least one
    validation         apart from them; may be empty, then nothing is evaluated and the last checkpoint is best
    provider           hidden states for a batch on the training device (`add_features` or the target)
    num_draft_tokens   depths K of the renewal estimate on `validation`; the first decides which checkpoint is best
    output_dir         gets checkpoints/, log.jsonl and result.json
    speculator_config  saved in every checkpoint, to build the module again; `run_config` goes to the trackers
    evaluate_start     log the estimate before the first step too: `speculator` has been trained before
    decode             called on the main process at every evaluation, its figures are logged beside the estimates;
                       given on every process or on none
    sampled            how the target sampled `validation`, None where it did not or not as it will be served

    Raises UserError on bad input or a run that does not match `output_dir`, NonFiniteError when training diverges.
    """
    if not documents:
        raise UserError("there are no documents to train on; look at the drop reasons of the responses stage")
    check_trackers(train.trackers)
    accelerator = parallel.make_accelerator(train.precision, device)
    depths = tuple(num_draft_tokens)
    run = _Run(accelerator, documents, validation, provider, optim, train, seed, depths, output_dir, sampled)
    state = run.start_or_resume(speculator)
    run.wrap(speculator)
    run.say_step_sizes()
    config = {**run_config, "world_size": accelerator.num_processes, "total_steps": run.total_steps}
    log = RunLog(accelerator, output_dir / "log.jsonl", state, run.total_steps, train.trackers, config)
    clock = Clock(state.seconds)
    eval_every = train.eval_every or train.save_every
    with log:
        if evaluate_start and validation and state.step == 0:
            scores = run.measure(decode, speculator_config)
            state.start_value = scores[run.metric]
            log.write(0, "eval", scores, acceptance=scores[run.metric])
            log.end_step(0)
        for epoch, micro_batches in run.plan.steps(state.step, run.total_steps):
            figures = run.step(state.step, micro_batches)
            state.step += 1
            state.trained_tokens += round(figures["tokens"])
            last = state.step == run.total_steps
            if state.step % train.log_every == 0 or last:
                log.write(state.step, "train", {"epoch": epoch, **figures})
            improved = False
            if validation and (state.step % eval_every == 0 or last):
                scores = run.measure(decode, speculator_config)
                improved = state.best_value is None or scores[run.metric] > state.best_value
                if improved:
                    state.best_step, state.best_value = state.step, scores[run.metric]
                log.write(state.step, "eval", scores, acceptance=scores[run.metric])
            log.end_step(state.step)
            if improved or last or state.step % train.save_every == 0:
                state.seconds, state.log_bytes = clock.seconds(), log.bytes_written()
                run.save(state, speculator_config)
    return run.result(state)


class _Run:
    """What stays the same from step to step."""

    def __init__(
        self,
        accelerator: Accelerator,
        documents: Sequence[Document],
        validation: Sequence[Document],
        provider: Provider,
        optim: OptimSection,
        train: TrainSection,
        seed: int,
        num_draft_tokens: tuple[int, ...],
        output_dir: Path,
        sampled: SampledAnswers | None,
    ) -> None:
        self.accelerator, self.provider, self.sampled = accelerator, provider, sampled
        self.documents, self.validation = documents, validation
        self.optim, self.settings, self.seed = optim, train, seed
        self.num_draft_tokens = num_draft_tokens
        self.output_dir, self.root = output_dir, output_dir / "checkpoints"
        self.metric = f"renewal@{num_draft_tokens[0]}"
        lengths = tuple(len(document.input_ids) for document in documents)
        supervised = tuple(document.num_response_tokens for document in documents)
        per_step = train.grad_accum_steps * accelerator.num_processes
        self.plan = StepPlan(lengths, supervised, train.micro_batch_tokens, seed, per_step)
        self.step_tokens = self.plan.step_tokens()
        self.total_steps = self.plan.total_steps(train.epochs, train.max_steps)

    def start_or_resume(self, speculator: Speculator) -> ckpt.TrainState:
        """A fresh state, or that of the latest checkpoint with its weights loaded. Raises UserError on a mismatch."""
        sizes = zip(self.documents, self.plan.lengths, self.plan.supervised, strict=True)
        identity = hashlib.sha256(json.dumps([[d.id, *counts] for d, *counts in sizes]).encode()).hexdigest()
        plan = {
            "documents": identity,
            "seed": self.seed,
            "micro_batch_tokens": self.settings.micro_batch_tokens,
            "grad_accum_steps x processes": self.plan.per_step,
            "normalization": self.settings.normalization,
            "total_steps": self.total_steps,
        }
        self.shapes = {name: tensor.shape for name, tensor in speculator.state_dict().items()}
        self.resumed_from = ckpt.latest_checkpoint(self.root)
        fresh = ckpt.TrainState(plan=plan, run_id=ckpt.run_identity(self.output_dir))
        state = fresh if self.resumed_from is None else ckpt.load_state(self.resumed_from)
        here = torch.tensor([state.step], device=self.accelerator.device)
        if bool((self.accelerator.gather(here) != state.step).any()):
            raise UserError(
                f"{self.root}: processes see different checkpoints; run.output_dir must be on shared storage"
            )
        if self.resumed_from is None:
            return fresh
        for name, value in plan.items():
            if state.plan.get(name) != value:
                raise UserError(
                    f"{self.resumed_from} was trained with {name} = {state.plan.get(name)}, this run has {value}; "
                    "restore it to resume, or choose another run.output_dir"
                )
        ckpt.load_weights(speculator, self.resumed_from)
        if self.accelerator.is_main_process:
            ckpt.clear_leftovers(self.root)
            ckpt.mark_best(self.root, state, self.metric)
        return state

    def say_step_sizes(self) -> None:
        """One line: a loss is a mean over a step, so in steps of unlike size tokens weigh unlike."""
        least, most = min(self.step_tokens), max(self.step_tokens)
        line = f"train: {len(self.step_tokens)} steps an epoch, of {least:,} to {most:,} supervised tokens"
        if most > 2 * least:
            line += "; larger train.micro_batch_tokens or train.grad_accum_steps bring them closer together"
        if self.accelerator.is_main_process:
            Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)

    def wrap(self, speculator: Speculator) -> None:
        """Hand the module to the engine and restore the optimiser. The engines change it in place."""
        self.speculator = speculator
        self.model, self.optimizer = parallel.prepare(self.accelerator, speculator, self.optim)
        if self.resumed_from is not None:
            parallel.load_optimizer(self.accelerator, self.model, self.optimizer, self.resumed_from)

    def step(self, step: int, micro_batches: list[Rows]) -> dict[str, float]:
        """One optimiser step. Returns its figures, summed over the window and all processes."""
        accelerator, world = self.accelerator, self.accelerator.num_processes
        started = Clock(0.0)
        rate = self.optim.lr * learning_rate_scale(
            step,
            self.total_steps,
            warmup_ratio=self.optim.warmup_ratio,
            schedule=self.optim.schedule,
            min_lr_ratio=self.optim.min_lr_ratio,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        mine = micro_batches[accelerator.process_index :: world]
        batches = [self._batch(self.documents, rows) for rows in mine]
        counts = torch.stack([self.speculator.supervised_counts(batch) for batch in batches]).sum(0)
        counts = accelerator.reduce(counts, "sum")
        normalizer = torch.where(counts > 0, counts, torch.ones_like(counts))
        losses, totals = [], Totals()
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            # By place in the window, not by process: another split of the same window draws the same numbers.
            place = index * world + accelerator.process_index
            set_seed((self.seed * 1_000_003 + step * self.plan.per_step + place) % 2**32)
            with parallel.synchronised_only(accelerator, self.model, last):
                loss, sums, metric_counts = self.model(self.provider(batch), normalizer)
                # The engine averages gradients over processes; the loss is already divided by the global count.
                parallel.backward(accelerator, self.model, loss * world, last)
            losses.append(loss.detach().double())
            totals.add_total("loss", losses[-1])
            totals.add_total("tokens", (batch.loss_weight_BT > 0).sum())
            for name, value in sums.items():
                totals.add_mean(name, value, metric_counts[name])
        norm = parallel.clip_gradients(accelerator, self.model, self.optim.max_grad_norm)
        self._stop_if_not_finite(step, norm, torch.stack(losses), mine)
        self.optimizer.step()
        self.optimizer.zero_grad()
        figures = totals.reduced(accelerator)
        seconds = started.seconds()
        return {
            **figures,
            "grad_norm": float(norm),
            "learning_rate": rate,
            "tokens_per_second": figures["tokens"] / seconds,
            "memory_gb": peak_memory(accelerator.device) / 1e9,
        }

    def _batch(self, documents: Sequence[Document], rows: Rows) -> Batch:
        batch = build_batch(documents, rows, None, self.settings.normalization)
        return batch.to(self.accelerator.device)

    def _stop_if_not_finite(self, step: int, norm: Tensor, losses: Tensor, mine: list[Rows]) -> None:
        """Every process stops together, before the optimiser touches the weights (N01); DeepSpeed's own has stepped."""
        bad = (~torch.isfinite(norm)) | (~torch.isfinite(losses)).any()
        if not bool(self.accelerator.reduce(bad.float(), "sum") > 0):
            return
        suspects: list[str] = []
        for rows, loss in zip(mine, losses.tolist(), strict=True):
            if not torch.isfinite(torch.tensor(loss)):
                suspects += self._suspects(rows)
        named = sorted(gather_object(suspects))
        where = f"documents {', '.join(named)}" if named else "the gradients, though every loss is finite"
        raise NonFiniteError(
            f"step {step + 1}: loss or gradient is not finite (gradient norm {float(norm)}) because of {where}; "
            f"{parallel.undone(self.accelerator)}. Look at these documents, or lower optim.lr"
        )

    def _suspects(self, rows: Rows) -> list[str]:
        """Ids in the rows whose hidden states are not finite; in all rows if all states are."""
        batch = self.provider(self._batch(self.documents, rows))
        row_is_bad = torch.zeros(len(batch.row_ids), dtype=torch.bool, device=batch.input_ids_BT.device)
        for values in (batch.aux_hidden_BTAH, batch.last_hidden_BTH, batch.target_lse_BT):
            if values is not None:
                row_is_bad |= ~torch.isfinite(values).flatten(1).all(1)
        chosen = row_is_bad.tolist() if bool(row_is_bad.any()) else [True] * len(batch.row_ids)
        return [document for ids, bad in zip(batch.row_ids, chosen, strict=True) if bad for document in ids]

    def measure(self, decode: Decode | None, speculator_config: Mapping[str, Any]) -> dict[str, float]:
        """The estimates, and the figures of `decode` where it is given."""
        scores = self.evaluate()
        return scores if decode is None else scores | self.decode(decode, speculator_config)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Estimates of the acceptance length on the validation documents, shared out over processes."""
        accelerator = self.accelerator
        plan = plan_epoch(
            [len(document.input_ids) for document in self.validation],
            [document.num_response_tokens for document in self.validation],
            micro_batch_tokens=self.settings.micro_batch_tokens,
            seed=0,
            epoch=0,
            per_step=accelerator.num_processes,
        )
        self.model.eval()
        deepest = max(self.num_draft_tokens)
        hits, drawn = list[ResponseHits](), list[ResponseHits]()
        with parallel.gathered(accelerator, self.model):
            for micro_batches in plan:
                batch = self.provider(self._batch(self.validation, micro_batches[accelerator.process_index]))
                hits += self.speculator.draft_hits(batch, deepest)
                if self.sampled is not None:
                    drawn += self.speculator.draft_hits(self.sampled.add_probs(batch), deepest, self.sampled.drawn)
        figures = reduced_estimates(accelerator, hits, self.num_draft_tokens)
        if self.sampled is not None:
            sampled = reduced_estimates(accelerator, drawn, self.num_draft_tokens)
            figures |= self.sampled.figures(figures, sampled, self.num_draft_tokens)
        return figures

    def decode(self, decode: Decode, speculator_config: Mapping[str, Any]) -> dict[str, float]:
        """The figures of `decode` on the main process, nothing elsewhere. It gets the weights as files, gathered from
        whatever engine shards them, and builds its own speculator from them."""
        tensors = parallel.model_tensors(self.accelerator, self.model)
        if not self.accelerator.is_main_process:
            return {}
        directory = self.root / "decode.tmp"
        ckpt.begin_checkpoint(directory)
        ckpt.write_speculator(directory, tensors, speculator_config)
        try:
            return decode(directory)
        except torch.OutOfMemoryError:
            message = "train: no memory left for a decode beside training; set train.decode_prompts=0 or lower it"
            Console(stderr=True).print(message, style="yellow", markup=False, soft_wrap=True)
            return {}
        finally:
            shutil.rmtree(directory)

    def save(self, state: ckpt.TrainState, speculator_config: Mapping[str, Any]) -> None:
        """A complete checkpoint, then best.json, then the removal of old ones: in this order nothing is ever lost."""
        accelerator = self.accelerator
        model = parallel.model_tensors(accelerator, self.model)
        optimizer = parallel.optimizer_tensors(accelerator, self.model, self.optimizer)
        temporary = ckpt.temporary_path(self.root, state.step)
        if accelerator.is_main_process:
            ckpt.begin_checkpoint(temporary)
        accelerator.wait_for_everyone()
        parallel.save_engine_state(accelerator, self.model, temporary)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            ckpt.finish_checkpoint(temporary, state, model, self.shapes, optimizer, speculator_config)
            ckpt.mark_best(self.root, state, self.metric)
            ckpt.prune_checkpoints(self.root, self.settings.keep_checkpoints, state.best_step)
        accelerator.wait_for_everyone()

    def result(self, state: ckpt.TrainState) -> TrainResult:
        """Also written to result.json."""
        last, best = ckpt.latest_checkpoint(self.root), ckpt.best_checkpoint(self.root)
        result = TrainResult(
            steps=state.step,
            best_checkpoint=str(best),
            last_checkpoint=str(last),
            best_metric=self.metric,
            best_value=state.best_value,
            start_value=state.start_value,
            trained_tokens=state.trained_tokens,
            seconds=state.seconds,
            peak_memory=peak_memory(self.accelerator.device),
            smallest_step_tokens=min(self.step_tokens),
            largest_step_tokens=max(self.step_tokens),
        )
        if self.accelerator.is_main_process:
            atomic_write_json(self.output_dir / "result.json", asdict(result))
        return result
