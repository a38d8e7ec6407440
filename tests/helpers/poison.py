"""Callbacks that make a run fail."""

import os
import signal
import time

import lightning as L
import torch


class PoisonLoss(L.Callback):
    """Makes the loss NaN on one rank, at one batch."""

    def __init__(self, rank: int, batch: int) -> None:
        self.rank, self.batch = rank, batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank != self.rank or batch_idx != self.batch:
            return
        name = "score" if hasattr(pl_module, "score") else "loss_from_representations"
        original = getattr(pl_module, name)

        def poisoned(*arguments, **options):
            output = original(*arguments, **options)
            return output._replace(loss=output.loss * float("nan"))

        setattr(pl_module, name, poisoned)


class PoisonGradient(L.Callback):
    """Makes a parameter's gradient infinite at one batch; the loss stays finite."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == self.batch:
            next(p for p in pl_module.parameters() if p.grad is not None).grad.view(-1)[0] = torch.inf


class PoisonBackward(L.Callback):
    """Makes a gradient infinite on one rank, at one batch, before gradients are accumulated or averaged."""

    def __init__(self, rank: int, batch: int) -> None:
        self.rank, self.batch, self.is_on = rank, batch, False

    def on_train_start(self, trainer, pl_module):
        next(parameter for parameter in pl_module.parameters() if parameter.requires_grad).register_hook(self._poisoned)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.is_on = trainer.global_rank == self.rank and batch_idx == self.batch

    def _poisoned(self, gradient):
        if not self.is_on:
            return gradient
        poisoned = gradient.clone()
        poisoned.view(-1)[0] = torch.inf
        return poisoned


class DriftingWeight(L.Callback):
    """Flips a bit of a weight on rank 1 after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step and trainer.global_rank == 1:
            with torch.no_grad():
                next(iter(pl_module.parameters())).view(-1).view(torch.int32)[3] ^= 1


class KillWorker(L.Callback):
    """Kills a worker of the loader at one batch, as the kernel does when memory runs out."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch:
            worker = trainer.train_dataloader._iterator._workers[0].pid
            print(f"worker {worker}", flush=True)
            os.kill(worker, signal.SIGKILL)
            time.sleep(20)
