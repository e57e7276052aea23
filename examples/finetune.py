"""Fine-tune a Hugging Face model from safetensors files with low-rank adapters, sharded by hp_compile.

    python examples/finetune.py --mesh dp_shard=2,tp=2 --tp-plan auto
    torchrun --standalone --nproc-per-node 2 examples/finetune.py --checkpoint FOLDER

FOLDER is what `save_pretrained` wrote, of a model whose tokens can be bytes (256 or more of them) and whose only buffers are
rotary ones, such as Llama or Qwen3; without it a small Llama with random weights is saved and used. No rank ever holds the
whole model: it is built on the meta device and sharded, then each rank reads its own slices. Writes `adapters` and `merged`
into `--output`; `transformers` loads the latter.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch import launch
from options import UsageError, mesh_dims, tp_plan
from train import check_mesh

if TYPE_CHECKING:
    import torch
    from torch import nn


HELD_OUT = 100_000  # bytes at the end of the text that are not trained on


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run, as the command line describes it. Field names are the names of the flags."""

    checkpoint: Path | None
    mesh: tuple[tuple[str, int], ...]
    tp_plan: str | None
    backend: str
    targets: list[str]
    rank: int
    alpha: float
    steps: int
    batch_size: int
    seq_len: int
    lr: float
    seed: int
    output: Path


def main() -> int:
    """Checks the flags, starts ranks if torchrun has not, fine-tunes. Returns the exit code."""
    options = parse()
    world_size = math.prod(size for _, size in options.mesh)
    started = int(os.environ.get("WORLD_SIZE", world_size))
    try:
        if started != world_size:
            raise UsageError(f"--mesh has {world_size} ranks, but {started} were started")
        check_mesh(options.mesh, options.tp_plan)
        if options.checkpoint is not None and not (options.checkpoint / "config.json").is_file():
            raise UsageError(f"--checkpoint {options.checkpoint}: holds no config.json")
    except UsageError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"finetune.py: error: {error}", file=sys.stderr)
        return 2
    if "WORLD_SIZE" not in os.environ:
        return launch(__file__, sys.argv[1:], world_size)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch|copyreg")
    return Finetuning(options).main()


def parse() -> Options:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, default=None, help="folder of a Hugging Face model")
    add("--mesh", type=mesh_dims, default=(("dp_shard", 2),), help="e.g. dp_shard=2,tp=2")
    add("--tp-plan", default=None, help="auto, or a JSON file with styles by glob")
    add(
        "--backend", choices=("inductor", "aot_eager"), default="aot_eager", help="how programs run"
    )
    add("--targets", nargs="+", default=["q_proj", "k_proj", "v_proj", "o_proj"], help="layers")
    add("--rank", type=int, default=8, help="of the adapters")
    add("--alpha", type=float, default=16.0, help="weight of the adapters")
    add("--steps", type=int, default=40, help="optimizer steps")
    add("--batch-size", type=int, default=4, help="sequences per data rank")
    add("--seq-len", type=int, default=64, help="bytes per sequence")
    add("--lr", type=float, default=1e-2, help="AdamW's learning rate")
    add("--seed", type=int, default=0, help="of adapters and data order")
    add(
        "--output",
        type=Path,
        default=Path("outputs/finetune"),
        help="folder for everything written",
    )
    return Options(**vars(parser.parse_args()))


class Finetuning:
    """Everything a rank holds.

    Args:
        options: The run.
    """

    def __init__(self, options: Options) -> None:
        import torch
        import torch.distributed as dist
        from data import Batches, data_rank, standard_library
        from torch.distributed.device_mesh import init_device_mesh

        self.options = options
        dist.init_process_group("gloo")
        self.first = dist.get_rank() == 0
        names = tuple(name for name, _ in options.mesh)
        sizes = tuple(size for _, size in options.mesh)
        self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        self.data_rank, self.data_ranks = data_rank(self.mesh)
        text = standard_library()
        self.batches = Batches(text[:-HELD_OUT], options.seq_len, options.seed)
        held_out = Batches(text[-HELD_OUT:], options.seq_len, options.seed)
        self.held_out = held_out.take(16, 0, 1, torch.device("cpu"))
        self.checkpoint = options.checkpoint or self._make_checkpoint()

    def main(self) -> int:
        """Loads, trains, saves, and loads again with transformers. Returns the exit code."""
        import torch
        import torch.distributed as dist

        import hp_compile

        model, adapters = self._load()
        frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self._say(
            f"{trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters are trained, on "
            + " x ".join(f"{name}={size}" for name, size in self.options.mesh)
        )
        plan = model.plan(**_arguments(torch.zeros(1, self.options.seq_len, dtype=torch.int64)))
        plan.verify()
        self._say(
            f"proved: every gradient is reduced exactly once over every mesh dim, by "
            f"{len(plan.collectives)} collectives a step"
        )
        before = {name: _digest(param) for name, param in frozen.items()}
        start = self._loss(model)
        self._train(model)
        end = self._loss(model)
        changed = [name for name, param in frozen.items() if _digest(param) != before[name]]
        self._say(
            f"loss on held-out text {start:.3f} -> {end:.3f}; {len(frozen) - len(changed)} of {len(frozen)} frozen "
            "parameters are bit for bit as they were"
        )
        from lora import merge

        ours = _logits(model, self.held_out[0])
        output = self.options.output
        hp_compile.save_safetensors(model, output / "adapters", keys=adapters)
        merge(model)
        base = [name for name in model.state_dict() if name not in set(adapters)]
        hp_compile.save_safetensors(model, output / "merged", keys=base)
        good = not changed and end < start
        if self.first:
            config: Any = model.config
            config.save_pretrained(output / "merged")
            good = self._reload(ours) and good
        dist.barrier()
        dist.destroy_process_group()
        return 0 if good else 1

    def _make_checkpoint(self) -> Path:
        """A small Llama with random weights, as transformers saves it."""
        import torch.distributed as dist
        from models import build_model

        folder = self.options.output / "base"
        if self.first:
            model: Any = build_model(
                "hf:llama", dim=64, layers=2, seq_len=self.options.seq_len, seed=0
            )
            model.save_pretrained(folder, max_shard_size="100KB")
        dist.barrier()
        return folder

    def _load(self) -> tuple[Any, list[str]]:
        """The sharded model, its frozen weights read in slices; and the names of the adapters."""
        import torch
        import transformers
        from lora import add_adapters, initial_adapters

        import hp_compile

        options = self.options
        config = transformers.AutoConfig.from_pretrained(self.checkpoint)
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(config)
        rotary = model.get_submodule(f"{model.base_model_prefix}.rotary_emb")
        buffers = dict(type(rotary)(config=config).named_buffers())
        for name in list(rotary._buffers):  # no checkpoint holds them
            rotary._buffers[name] = buffers[name]
        adapters = add_adapters(model, options.targets, options.rank, options.alpha)
        policy = hp_compile.Policy(backend=options.backend, tp_plan=tp_plan(options.tp_plan))
        hp_compile.shard(model, self.mesh, policy)
        keys = hp_compile.load_safetensors(model, self.checkpoint, strict=False)
        if set(keys.missing_keys) != set(adapters) or keys.unexpected_keys:
            raise SystemExit(f"finetune.py: {self.checkpoint} does not fit its config: {keys}")
        model.load_state_dict(initial_adapters(model, options.seed), strict=False, assign=True)
        return model, adapters

    def _train(self, model: nn.Module) -> None:
        import torch
        import torch.distributed as dist
        from models import next_byte_loss

        import hp_compile

        options = self.options
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=options.lr)
        for step in range(options.steps):
            tokens, targets = self.batches.take(
                options.batch_size, self.data_rank, self.data_ranks, torch.device("cpu")
            )
            loss = next_byte_loss(model(**_arguments(tokens)), targets)
            loss.backward()
            hp_compile.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach()
            dist.all_reduce(mean)
            if step % max(1, options.steps // 10) == 0 or step == options.steps - 1:
                value = mean.item() / dist.get_world_size()
                self._say(f"step {step + 1:>4}/{options.steps}  loss {value:.3f}")

    def _loss(self, model: nn.Module) -> float:
        from models import next_byte_loss

        tokens, targets = self.held_out
        return next_byte_loss(_logits(model, tokens), targets).item()

    def _reload(self, ours: torch.Tensor) -> bool:
        """Loads what was saved on one rank with transformers, and compares logits."""
        import transformers
        from lora import add_adapters
        from safetensors.torch import load_file

        options, output = self.options, self.options.output
        merged: Any = transformers.AutoModelForCausalLM.from_pretrained(output / "merged")
        base: Any = transformers.AutoModelForCausalLM.from_pretrained(self.checkpoint)
        add_adapters(base, options.targets, options.rank, options.alpha)
        adapters = load_file(output / "adapters" / "model.safetensors")
        assert not base.load_state_dict(adapters, strict=False).unexpected_keys
        gaps = [
            (_logits(other, self.held_out[0]) - ours).abs().max().item() for other in (merged, base)
        ]
        scale = ours.abs().max().item()
        self._say(
            f"loaded with transformers: logits of the merged model differ by {gaps[0]:.1e}, of base and adapters by "
            f"{gaps[1]:.1e}, of {scale:.1f}; in {output}"
        )
        return max(gaps) < 1e-4 * scale

    def _say(self, text: str) -> None:
        if self.first:
            print(text, flush=True)


def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    import torch

    with torch.no_grad():
        return model(**_arguments(tokens)).logits


def _arguments(tokens: torch.Tensor) -> dict[str, Any]:
    """Of a call of a Hugging Face model."""
    return {"input_ids": tokens, "use_cache": False}


def _digest(param: Any) -> str:
    """Of this rank's part."""
    return hashlib.sha256(param.to_local().detach().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
