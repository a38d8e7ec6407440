"""P18: a resumed run ends its first step within 1.2 of a fresh run's time, at step 10 as at step 1,000,000.

MiniLM, AdamW and pairs of random words; the epoch has two million steps, so both checkpoints are within it. All of
`fit` is timed, in this process, with the libraries loaded: parsing, checks, model, data, the checkpoint (read twice,
once to check it), the first step, and the end of the run.

Twenty steps are trained. To get the checkpoint of step 1,000,000, each count in that of step 10 is advanced. In the
same way the checkpoint of step 10 must become that of step 20, weights apart.
"""

import json
import logging
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from torch import Tensor

from benchmarks.harness import compare_all, options, record
from benchmarks.workloads import random_encoder, random_texts
from embeddings.cli.fit import TrainerCLI, run_trainer
from embeddings.common.checkpoint_file import read_checkpoint, write_checkpoint
from embeddings.data import BlendedBatchSampler
from embeddings.models import MeanPooling

EPOCH_STEPS, LATE = 2_000_000, 1_000_000
LENGTH = 32
# Keys whose numbers are not counts: indices of parameters, and the config of the run.
NO_COUNTS = ("params", "run_config")
PEERS = "torch, lightning"


class Stop(L.Callback):
    """Ends a run at a step, and records the rows of its last batch."""

    def __init__(self, step: int) -> None:
        self.step, self.rows = step, []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the rows."""
        if trainer.global_step >= self.step:
            self.rows: list[int] = batch.row_B.tolist()
            trainer.should_stop = True


def num_pairs(tiny: bool) -> int:
    """Rows of the data."""
    return 256 if tiny else 10_000


def small_backbone(folder: Path) -> str:
    """A random encoder of one layer on disk; returns its folder."""
    embedder = random_encoder(MeanPooling(48), LENGTH, num_layers=1)
    embedder.backbone.save_pretrained(folder)
    embedder.tokenizer.save_pretrained(folder)
    return str(folder)


def config(folder: Path, tiny: bool) -> dict[str, Any]:
    """The config that the runs share; writes their data, and in a tiny run their model."""
    backbone = small_backbone(folder / "backbone") if tiny else "all-MiniLM-L6-v2"
    texts = random_texts(2 * num_pairs(tiny), LENGTH)
    path = folder / "pairs.jsonl"
    lines = (json.dumps({"query": q, "positive": p}) for q, p in zip(texts[::2], texts[1::2], strict=True))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sampler = {"class_path": "embeddings.data.BlendedBatchSampler", "init_args": {"steps_per_epoch": EPOCH_STEPS}}
    return {
        "seed_everything": 0,
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": EPOCH_STEPS,
            "use_distributed_sampler": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "logger": False,
            "default_root_dir": str(folder),
        },
        "model": {
            "class_path": "embeddings.modules.NVEmbedModule",
            "init_args": {
                "backbone": {"name": backbone},
                "pooling": {"class_path": "embeddings.models.MeanPooling"},
                "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-5}},
                "schedule": {"warmup_steps": 0, "decay": "constant"},
            },
        },
        "data": {
            "class_path": "embeddings.data.EmbeddingDataModule",
            "init_args": {
                "text": {"query_max_length": LENGTH, "document_max_length": LENGTH},
                "batch_size": 4 if tiny else 32,
                "num_negatives": 0,
                "sampler": sampler,
                "cache_dir": str(folder / "cache"),
                "sources": [{"name": "pairs", "path": str(path)}],
            },
        },
    }


def fit(words: list[str], last_step: int) -> list[int]:
    """Run until a step is complete; returns the rows of its batch.

    Raises:
        RuntimeError: If the run ended at another step.
    """
    stop = Stop(last_step)

    class StoppedCLI(TrainerCLI):
        def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
            trainer = super().instantiate_trainer(**kwargs)
            trainer.callbacks.append(stop)  # type: ignore[attr-defined]
            return trainer

    reached = run_trainer(["fit", *words], StoppedCLI).trainer.global_step
    if reached != last_step:
        raise RuntimeError(f"the run ended at step {reached}, not at {last_step}")
    return stop.rows


def advanced(content: Any, before: int, after: int) -> Any:
    """The content with each count near step `before` advanced to `after`; some counts differ from the step by one."""
    if isinstance(content, dict):
        return type(content)(
            (key, value if key in NO_COUNTS else advanced(value, before, after)) for key, value in content.items()
        )
    if isinstance(content, list | tuple):
        return type(content)(advanced(value, before, after) for value in content)
    is_number = (isinstance(content, int) and not isinstance(content, bool)) or (
        isinstance(content, Tensor) and content.ndim == 0
    )
    return content + (after - before) if is_number and abs(content - before) <= 1 else content


def write_checkpoints(folder: Path, words: list[str]) -> list[Path]:
    """Checkpoints of steps 10 and 1,000,000.

    Raises:
        RuntimeError: If the first, advanced to step 20, differs from the checkpoint of step 20, weights apart.
    """
    keep = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"dirpath": str(folder), "filename": "{step}", "every_n_train_steps": 10, "save_top_k": -1},
    }
    fit([*words, "--trainer.enable_checkpointing=true", f"--trainer.callbacks={json.dumps([keep])}"], 20)
    early, later = (without_callbacks(read_checkpoint(folder / f"step={step}.ckpt")) for step in (10, 20))
    counts = [step_counts(later), step_counts(advanced(early, 10, 20))]
    if not any(isinstance(count, Tensor) for count in counts[0]) or counts[0] != counts[1]:
        raise RuntimeError("an advanced checkpoint differs from that of the later step: nothing to compare")
    paths = [folder / "early.ckpt", folder / "late.ckpt"]
    for path, content in zip(paths, (early, advanced(early, 10, LATE)), strict=True):
        write_checkpoint(content, path)
    return paths


def step_counts(content: Any) -> list[Any]:
    """Everything in a content except larger tensors."""
    if isinstance(content, dict):
        return [x for key, value in content.items() for x in (key, *step_counts(value))]
    if isinstance(content, list | tuple):
        return [x for value in content for x in step_counts(value)]
    return [] if isinstance(content, Tensor) and content.ndim else [content]


def without_callbacks(content: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's content without the states of callbacks, the logged metrics and the names of its files."""
    content["loops"]["fit_loop"]["state_dict"] |= {"metrics": {}, "written_checkpoints": []}
    return content | {"callbacks": {}}


def main() -> None:
    """Time the runs; each checks that its first batch has the rows of the plan."""
    chosen = options(__doc__, threads=2)
    warnings.simplefilter("ignore")
    for library in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(library).setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        content = config(folder, chosen.tiny)
        (folder / "run.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
        words = ["--config", str(folder / "run.yaml")]
        early, late = write_checkpoints(folder, words)
        starts = {0: words, 10: [*words, f"--ckpt_path={early}"], LATE: [*words, f"--ckpt_path={late}"]}
        batch_size = content["data"]["init_args"]["batch_size"]
        plan = BlendedBatchSampler([num_pairs(chosen.tiny)], batch_size, steps_per_epoch=EPOCH_STEPS)

        def first_step(step: int) -> None:
            """A run from one step to the next."""
            if fit(starts[step], step + 1) != plan.global_batch(0, step).tolist():
                raise RuntimeError(f"the batch after step {step} is not the plan's: nothing to compare")

        resumed = {f"step {step:,}": partial(first_step, step) for step in (10, LATE)}
        size = f"checkpoint of {early.stat().st_size / 2**20:.0f} MiB"
        for after, ratio in compare_all(resumed, partial(first_step, 0), chosen).items():
            record(chosen, f"P18 first step after {after} over a fresh start's, {size}", ratio, "ratio", "<=1.2", PEERS)


if __name__ == "__main__":
    main()
