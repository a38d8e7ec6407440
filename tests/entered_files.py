"""Counts the files and functions of the library that four common actions enter: `python -m tests.entered_files`.

A reader who follows one of them opens these files. Bodies of modules and classes, which run once on import, do not
count.
"""

import argparse
import functools
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lightning as L
from lightning.pytorch.trainer import Trainer

import embeddings
from embeddings.cli.fit import run_trainer
from embeddings.data.datamodule import PlannedDataModule
from embeddings.inference import Encoder, encode_corpus
from embeddings.models import Embedder, MeanPooling
from tests.helpers.runs import component, run_config, write_config, write_retrieval_folder
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer

PACKAGE = str(Path(embeddings.__file__).parent)


class Entered:
    """The functions of the library that ran inside `watching`."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()

    @property
    def files(self) -> list[str]:
        """Files below `embeddings/`, sorted."""
        return sorted({code.co_filename.removeprefix(f"{PACKAGE}/") for code in self.codes})

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note each Python function that starts, in every thread of this process."""
        sys.setprofile(self._note)
        threading.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # The body of a module or class has no CO_OPTIMIZED flag.
        if event == "call" and code.co_flags & 1 and code.co_filename.startswith(PACKAGE):
            self.codes.add(code)


class _WatchedStep(L.Callback):
    """Watches the third step: by then every lazy import and measurement of the first ones has run."""

    def __init__(self, entered: Entered) -> None:
        self.entered = entered

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self._context = self.entered.watching()
            self._context.__enter__()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            self._context.__exit__(None, None, None)


def gradcache_step(folder: Path) -> Entered:
    """One training step of NV-Embed under GradCache: forward, backward, optimiser."""
    entered = Entered()
    original = Trainer.fit

    def fit(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        trainer.callbacks.append(_WatchedStep(entered))
        return original(trainer, *args, **kwargs)

    with _replaced(fit):
        run_trainer(_fit_words(folder))
    return entered


def records_to_batch(folder: Path) -> Entered:
    """A file of records to the first training batch: conversion, sampler, loader, tokenizer."""
    entered = Entered()

    def fit(trainer: Trainer, module: Any, datamodule: Any, **options: Any) -> None:
        data: PlannedDataModule = datamodule
        data.trainer = trainer
        trainer.strategy.connect(module)
        with entered.watching():
            data.prepare_data()
            data.setup("fit")
            next(iter(data.train_dataloader()))

    with _replaced(fit):
        run_trainer(_fit_words(folder))
    return entered


def start_of_fit(folder: Path) -> Entered:
    """`fit` from its command line until Lightning's loop takes over, with data that was converted before."""
    words, entered = _fit_words(folder), Entered()
    run_trainer(words)
    again = Entered()

    def fit(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        entered.codes |= again.codes

    with _replaced(fit), again.watching():
        run_trainer(words)
    return entered


def encode_to_disk(folder: Path) -> Entered:
    """A model directory and a corpus file to a folder of vectors."""
    Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(32)).save_pretrained(folder / "model")
    corpus = write_retrieval_folder(folder / "retrieval") / "corpus.jsonl"

    def encode(output: str) -> None:
        encode_corpus(Encoder.from_pretrained(folder / "model", device="cpu"), corpus, folder / output)

    encode("first")
    entered = Entered()
    with entered.watching():
        encode("second")
    return entered


ACTIONS: dict[str, Callable[[Path], Entered]] = {
    "GradCache step": gradcache_step,
    "records to a batch": records_to_batch,
    "start of fit": start_of_fit,
    "encode to disk": encode_to_disk,
}


def _fit_words(folder: Path) -> list[str]:
    config = run_config(folder)
    config["trainer"]["callbacks"] = [component("GradCacheCallback", mini_batch_tokens=64)]
    return ["fit", "--config", write_config(folder, config)]


@contextmanager
def _replaced(fit: Any) -> Iterator[None]:
    original = Trainer.fit
    # The parser reads the signature of `Trainer.fit`.
    Trainer.fit = functools.wraps(original)(fit)
    try:
        yield
    finally:
        Trainer.fit = original


def main() -> None:
    """Print the counts; `--files` also lists the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="list the files, with their functions")
    chosen = parser.parse_args()
    for name, action in ACTIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            entered = action(Path(folder))
        print(f"{name}: {len(entered.files)} files, {len(entered.codes)} functions")
        for file in entered.files if chosen.files else ():
            codes = [code for code in entered.codes if code.co_filename == f"{PACKAGE}/{file}"]
            print(f"  {file}: {', '.join(sorted(code.co_qualname for code in codes))}")


if __name__ == "__main__":
    main()
