"""Checkpoints with torch.distributed.checkpoint: model, optimizer, step and position in the data."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

KEEP = 2  # newest checkpoints that stay on disk


def save(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]
) -> Path:
    """Writes `folder/checkpoints/step_N`; collective. Returns where it is.

    Args:
        folder: Output folder of the run.
        model: The sharded model; every rank writes its own shards.
        optimizer: Its optimizer.
        progress: Finished steps as `step`, and `position` in the data.
    """
    path = folder / "checkpoints" / f"step_{progress['step']:06d}"
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "progress": progress}, checkpoint_id=path)
    dist.barrier()
    if dist.get_rank() == 0:
        for old in complete(folder)[:-KEEP]:
            shutil.rmtree(old)
    return path


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Reads a checkpoint into model and optimizer, on any mesh; collective. Returns the progress."""
    weights, moments = get_state_dict(model, optimizer)
    progress = {"step": 0, "position": 0}
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "progress": progress}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return dict(state["progress"])


def complete(folder: Path) -> list[Path]:
    """Checkpoints that were written to the end, oldest first; the metadata file is written last."""
    found = (folder / "checkpoints").glob("step_*")
    return sorted(path for path in found if (path / ".metadata").is_file())
