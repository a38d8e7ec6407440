"""G1 to G16: training on one GPU, measured in a quarter of an hour: `python -m benchmarks.gpu`.

Weights, texts and vectors are random, so nothing is downloaded. The claims are in groups. Each group runs in a separate
process with a time limit: if it fails or takes too long, only its own rows are missing. Each row is written as soon as
it is measured.

    python -m benchmarks.gpu --check        what the machine supports, and what would be skipped
    python -m benchmarks.gpu --only G5,G10  some claims, with the others of their groups
    python -m benchmarks.gpu --tiny         on the CPU, with tiny sizes; writes no row
    python -m benchmarks.gpu --profile DIR  a profile of one training step of each method, one file a method

Each claim has a value with a target, the limit that the device sets (operations or bytes over the rate measured in
the same process), and the ratio of its time to that of a peer.
"""

import argparse
import importlib.util
import math
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Action, Ratio, compare, record

GIB = 2**30
MINUTES = 15.0
# Of a method's profile, with the start of its process and the compiler.
PROFILE_SECONDS = 120.0


@dataclass(frozen=True)
class Claim:
    """One claim about a GPU.

    Attributes:
        what: What is measured.
        unit: Unit of the value.
        target: Bound of the value, on one H200.
        limit: What limits the value on any device; recorded in a separate row.
        peer: What the time is compared with.
    """

    what: str
    unit: str
    target: str
    limit: str
    peer: str


PRODUCTS = "its operations at the measured rate of 16-bit products"
CLAIMS = {
    "G1": Claim("7B LoRA and latent pooling, training", "tokens/s", ">=16000", PRODUCTS, "the backbone alone"),
    "G2": Claim("GradCache over the same mini-batches", "ratio", "<=1.45", "a second forward", "each trained once"),
    "G3": Claim("mixture of experts, training", "tokens/s", ">=550000", PRODUCTS, "dense MLP of equal operations"),
    "G4": Claim("137M encoder, training", "tokens/s", ">=600000", PRODUCTS, "transformers' model alone"),
    "G5": Claim("tiled InfoNCE, forward and backward", "ms", "<=60", "three products", "the dense matrix"),
    "G6": Claim("growth of peak memory with the batch", "ratio", "<=1.02", "vectors and gradients", "plain step"),
    "G7": Claim("anchor-token-aware pooling, 7B", "ratio", "<=1.003", "the last layer's scores again", "mean pooling"),
    "G8": Claim("latent pooling's share of a forward", "fraction", "<=0.05", PRODUCTS, "mean pooling"),
    "G9": Claim("spherical k-means", "s", "<=30", "products of rows and centroids", "faiss.Kmeans"),
    "G10": Claim(
        "exact search, top 200", "s a million queries", "<=100", "products of all pairs", "products and top k"
    ),
    "G11": Claim("encoding, 110M, 128 tokens", "tokens/s", ">=2000000", PRODUCTS, "the model alone, on the device"),
    "G12": Claim("stall of an asynchronous checkpoint", "s", "<=2", "the copy to main memory", "torch.save and fsync"),
    "G13": Claim("ZeRO-2 and GradCache against plain", "1e-6 of the update", "<=10", "float32", "a plain step"),
    "G14": Claim("fit, MiniLM, 3 negatives", "tokens/s", ">=1500000", PRODUCTS, "the engine alone, without an update"),
    "G15": Claim("training step over the peer's", "ratio", "<=0.65", PRODUCTS, "sentence-transformers' cached loss"),
    "G16": Claim("encoding of texts over the peer's", "ratio", "<=0.67", PRODUCTS, "SentenceTransformer.encode"),
}


@dataclass
class Bench:
    """Measures claims on a device and records their rows.

    Attributes:
        chosen: The command line.
    """

    chosen: argparse.Namespace

    @property
    def tiny(self) -> bool:
        """Whether sizes are tiny."""
        return bool(self.chosen.tiny)

    @property
    def device(self) -> torch.device:
        """The CPU in a tiny run, else the GPU."""
        return torch.device("cpu" if self.tiny else "cuda")

    def pick(self, tiny: Any, full: Any) -> Any:
        """The first value in a tiny run, else the second."""
        return tiny if self.tiny else full

    def claim(
        self,
        key: str,
        sizes: str,
        value: Ratio | float,
        limit: float,
        peer: Ratio | float | None = None,
        target: str | None = None,
    ) -> None:
        """Record a claim's value, its limit, and its time over the peer's, unless the value is that ratio."""
        claim = CLAIMS[key]
        self.row(f"{key} {claim.what}, {sizes}", value, claim.unit, target or claim.target)
        self.row(f"{key} limit of it: {claim.limit}, {sizes}", limit, claim.unit)
        if peer is not None:
            self.row(f"{key} time over that of {claim.peer}, {sizes}", peer, "ratio")

    def row(self, claim: str, value: Ratio | float, unit: str, target: str = "none") -> None:
        """Record one row, unless its value is NaN."""
        if math.isnan(value.median if isinstance(value, Ratio) else value):
            print(f"{claim}: not measured, no row", flush=True)
            return
        record(self.chosen, claim, value, unit, target, "torch", device_name(self.device))

    def skip(self, keys: str, why: str) -> None:
        """Print that claims have no rows, and why."""
        print(f"skipped {keys}: {why}", flush=True)

    def synchronised(self, action: Action) -> Action:
        """The action, followed by a wait for the device."""

        def run() -> None:
            action()
            if self.device.type == "cuda":
                torch.cuda.synchronize()

        return run

    def seconds(self, action: Action, rounds: int = 3) -> float:
        """The median time of an action, after one warm-up run."""
        run, times = self.synchronised(action), []
        for _ in range(1 if self.tiny else 1 + rounds):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:] or times)

    def once(self, action: Action) -> float:
        """The time of one run, without a warm-up."""
        start = time.perf_counter()
        self.synchronised(action)()
        return time.perf_counter() - start

    def over(self, ours: Action, peer: Action, min_seconds: float = 0.2) -> Ratio:
        """Our time over the peer's, see `harness.compare`; NaN if the comparison was void."""
        try:
            return compare(self.synchronised(ours), self.synchronised(peer), self.chosen, min_seconds)
        except RuntimeError as error:
            if not str(error).startswith("void"):
                raise
            print(error, flush=True)
            return Ratio(*4 * [math.nan])

    def peak_bytes(self, action: Action) -> int:
        """Peak device memory of an action beyond what was in use before; 0 on a CPU, where it is not measured."""
        if self.device.type != "cuda":
            action()
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.synchronised(action)()
        return int(torch.cuda.max_memory_allocated() - before)

    def largest(self, sizes: list[int], run: Callable[[int], object]) -> int:
        """The first of the sizes, given in descending order, at which `run` fits into memory."""
        for size in sizes:
            try:
                self.synchronised(lambda size=size: run(size))()  # type: ignore[misc]
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
            else:
                return size
        raise RuntimeError(f"the smallest size, {sizes[-1]}, does not fit into memory")

    @cached_property
    def bf16_rate(self) -> float:
        """Measured operations per second of 16-bit products of 8,192 x 8,192 matrices."""
        return self.product_rate(torch.bfloat16)

    def product_rate(self, dtype: torch.dtype) -> float:
        """Measured operations per second of products of square matrices."""
        size = self.pick(128, 8192)
        left, right = torch.randn(2, size, size, device=self.device).to(dtype)
        repeats = self.pick(1, 20)

        def multiply() -> None:
            for _ in range(repeats):
                left @ right

        return float(repeats * 2 * size**3 / self.seconds(multiply))


def device_name(device: torch.device) -> str | None:
    """Name and memory of a GPU; None for a CPU."""
    if device.type != "cuda":
        return None
    facts = torch.cuda.get_device_properties(device)
    return f"1 x {facts.name}, {facts.total_memory / 1e9:.0f} GB"


def driver() -> str:
    """The version of the NVIDIA driver, from nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return "unknown version"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return output.strip().splitlines()[0] if output.strip() else "unknown version"


def offers() -> dict[str, str]:
    """What the machine supports, by name; an empty string where it does not."""
    found = dict.fromkeys(("GPU", "driver", "bfloat16", "float8", "triton", "faiss for GPUs", "deepspeed"), "")
    for module, name in (("triton", "triton"), ("deepspeed", "deepspeed")):
        found[name] = "yes" if importlib.util.find_spec(module) else ""
    if importlib.util.find_spec("faiss"):
        import faiss

        # The CPU build of faiss has no such class.
        found["faiss for GPUs"] = "yes" if "StandardGpuResources" in vars(faiss) and faiss.get_num_gpus() else ""
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        found["GPU"] = f"{device_name(torch.device('cuda'))}, {torch.cuda.mem_get_info()[0] / 1e9:.0f} GB free"
        found["driver"] = f"{driver()}, CUDA {torch.version.cuda}, compute capability {capability[0]}.{capability[1]}"
        found["bfloat16"] = "yes" if torch.cuda.is_bf16_supported(including_emulation=False) else ""
        found["float8"] = "yes, not used here" if capability >= (8, 9) else ""
    return found


def report(found: dict[str, str]) -> list[str]:
    """Lines that state what the machine supports, and what is skipped without it."""
    needs = {"GPU": "every claim", "bfloat16": "every claim", "faiss for GPUs": "the peer of G9", "deepspeed": "G13"}
    needs |= {"triton": "the fused kernels of G7, which then uses tiles"}
    lines = [f"{name}: {value or 'none'}" for name, value in found.items()]
    return lines + [f"without {name} skipped: {what}" for name, what in needs.items() if not found[name]]


def run_group(name: str, chosen: argparse.Namespace) -> None:
    """Measure the claims of a group in this process."""
    from benchmarks import gpu_claims

    torch.set_num_threads(chosen.threads)
    gpu_claims.GROUPS[name].run(Bench(chosen))


def profile_method(name: str, chosen: argparse.Namespace) -> None:
    """Profile a training step of a method in this process."""
    from benchmarks.gpu_profile import write_profile

    torch.set_num_threads(chosen.threads)
    write_profile(Bench(chosen), name, chosen.profile, chosen.compiled)


def run_here_or_in_a_process(
    name: str, chosen: argparse.Namespace, seconds: float, run: Callable[[str, argparse.Namespace], None] = run_group
) -> bool:
    """Run a group in a separate process, or in this one if tiny; returns whether it succeeded in time."""
    start = time.monotonic()
    print(f"== {name}, at most {seconds:.0f} s", flush=True)
    if chosen.tiny:
        try:
            run(name, chosen)
        except Exception:
            traceback.print_exc()
            return False
        return True
    child = multiprocessing.get_context("spawn").Process(target=run, args=(name, chosen))
    child.start()
    child.join(seconds)
    if child.is_alive():
        child.kill()
        child.join()
        print(f"{name}: out of time; its rows so far are kept", flush=True)
        return False
    print(f"{name}: {time.monotonic() - start:.0f} s, exit code {child.exitcode}", flush=True)
    return child.exitcode == 0


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print what the machine supports, and exit")
    parser.add_argument("--tiny", action="store_true", help="run on the CPU with tiny sizes; writes no row")
    parser.add_argument("--only", default=",".join(CLAIMS), help="claims to measure, such as G1,G7")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="profile a step of each method into DIR, and exit")
    parser.add_argument("--compiled", action="store_true", help="profile compiled layers")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time limit of the whole run")
    parser.add_argument("--pairs", type=int, default=5, help="interleaved pairs to time")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 for all but one")
    chosen = parser.parse_args()
    chosen.only = [name.strip() for name in chosen.only.split(",")]
    if unknown := set(chosen.only) - set(CLAIMS):
        parser.error(f"no such claim: {', '.join(sorted(unknown))}; there are G1 to G{len(CLAIMS)}")
    chosen.threads = 1 if chosen.tiny else chosen.threads or max(2, torch.get_num_threads() - 1)
    return chosen


def main() -> int:
    """Check the machine, then measure the groups in turn within the time limit.

    Returns:
        1 if a group failed or had no time, 2 without a GPU that supports bfloat16, else 0.
    """
    chosen = options()
    found = offers()
    print("\n".join(report(found)), flush=True)
    if chosen.check:
        return 0
    if not chosen.tiny and not (found["GPU"] and found["bfloat16"]):
        print("error: needs a CUDA GPU with bfloat16; --tiny runs on a CPU", file=sys.stderr)
        return 2
    end, failed = time.monotonic() + 60 * chosen.minutes, list[str]()
    if chosen.profile is not None:
        from benchmarks.gpu_profile import METHODS

        for name in METHODS:
            seconds = min(PROFILE_SECONDS, max(1.0, end - time.monotonic()))
            if not run_here_or_in_a_process(name, chosen, seconds, profile_method):
                failed.append(name)
        return int(bool(failed))
    from benchmarks.gpu_claims import GROUPS

    for name, group in GROUPS.items():
        if not set(group.claims) & set(chosen.only):
            continue
        remaining = end - time.monotonic()
        if remaining <= 0:
            print(f"{name}: no time left for {', '.join(group.claims)}", flush=True)
            failed.append(name)
        elif not run_here_or_in_a_process(name, chosen, min(remaining, group.seconds)):
            failed.append(name)
    if failed:
        print(f"error: groups without all their rows: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
