"""One table: category -> action (docs/seams.md section 5) and the first step for a person."""

from __future__ import annotations

from collections.abc import Mapping

from lanterne.nouns import CauseCategory as C
from lanterne.nouns import Remedy, Subject

TABLE: Mapping[C, tuple[str, str]] = {
    C.DATA_STALL: (
        "profile",
        "Raise num_workers or prefetch_factor on {where}, and check its storage and its samples.",
    ),
    C.DATA_ORDER: (
        "rollback",
        "Compare the sampler's order with the last good run; set_epoch and the shuffle seed first.",
    ),
    C.UNEVEN_INPUTS: ("pause", "Give every rank the same number of batches: drop_last, or the Join context manager."),
    C.SLOW_COMPUTE: (
        "profile",
        "Profile {where} for one step; if the device itself is slow, restart without its node.",
    ),
    C.THERMAL_THROTTLE: (
        "restart_without_node",
        "Check cooling and power cap on {where}; move the job off it until then.",
    ),
    C.HOST_CONTENTION: ("collect_stacks", "Find what else runs on {where} (top, cgroup limits) and pin or remove it."),
    C.GC_PAUSE: ("collect_stacks", "Call gc.freeze() after start-up on {where} and collect by hand between steps."),
    C.RECOMPILE: ("collect_stacks", "Find the changing shape (TORCH_LOGS=recompiles); mark it dynamic or pad it."),
    C.GIL_HELD: ("collect_stacks", "Look at the stacks of {where}: native code holds the interpreter lock."),
    C.SLOW_LINK: (
        "restart_without_node",
        "Test the link of {where} (all_reduce_perf, ib_write_bw) and its cable or NIC.",
    ),
    C.TOPOLOGY_MISMATCH: ("give_up", "Compare NCCL_TOPO and the ring order with the cabling; fix the rank placement."),
    C.NETWORK_FAILURE: ("restart_without_node", "Check the NIC and switch port of {where}; restart on another node."),
    C.SEQUENCE_IMBALANCE: ("set_micro_batch", "Balance tokens across ranks: sort by length, pack, or cap the length."),
    C.PARTITION_IMBALANCE: ("pause", "Move layers from the heavy pipeline stage to the others (`lanterne plan`)."),
    C.EXCLUSIVE_WORK: (
        "collect_stacks",
        "Move the work that only {where} does off the training loop, or onto a thread.",
    ),
    C.RANK_CRASHED: ("restart", "Read the stack and stderr of {where}; restart from the last good checkpoint."),
    C.RANK_HUNG: ("collect_stacks", "Read the Python stack of {where}; restart the job once it is kept."),
    C.RANK_MISSING: ("restart", "Check that {where} was launched and reaches the rendezvous; then restart."),
    C.COLLECTIVE_MISMATCH: (
        "collect_stacks",
        "Compare the call sites in the evidence: the ranks disagree on one collective.",
    ),
    C.COLLECTIVE_DIVERGENCE: ("collect_stacks", "Look for a branch that depends on the rank around the call site."),
    C.EXTERNAL_TERMINATION: ("restart", "Ask the scheduler why it stopped the job (time limit, preemption); restart."),
    C.DEVICE_FAULT: ("restart_without_node", "Drain the node of {where}, run its diagnostics, restart without it."),
    C.OUT_OF_MEMORY: ("set_micro_batch", "Lower the micro-batch or turn on activation checkpointing on {where}."),
    C.MEMORY_LEAK: (
        "save_checkpoint",
        "Save, then look for tensors or caches kept across steps on {where} (tracemalloc).",
    ),
    C.FRAGMENTATION: (
        "empty_cache",
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; empty the cache meanwhile.",
    ),
    C.SHARED_MEMORY_EXHAUSTED: ("pause", "Enlarge /dev/shm (--shm-size) or lower num_workers on {where}."),
    C.BAD_BATCH: (
        "skip_batch",
        "Look at the samples of the batch on {where}; skip it and clip the gradient meanwhile.",
    ),
    C.LR_MISCONFIGURED: ("set_lr", "Set the learning rate back to its plan; check the scheduler and its resume state."),
    C.RESUME_STATE_LOST: ("rollback", "Restore optimizer, scheduler, scaler and sampler state, not only the weights."),
    C.ACCUMULATION_ERROR: ("pause", "Divide the loss by the accumulation steps and reduce on the last one only."),
    C.GRADIENT_EXPLOSION: (
        "clip_grad_norm",
        "Clip the gradient norm near its usual level; then look for its first layer.",
    ),
    C.GRADIENT_VANISHING: (
        "pause",
        "Check initialisation, normalisation and frozen parameters of the first dead layer.",
    ),
    C.NONFINITE_VALUES: (
        "rollback",
        "Roll back to before the first non-finite gradient; look at that parameter and batch.",
    ),
    C.FP16_OVERFLOW: ("set_loss_scale", "Lower the loss scale or use bfloat16; look at the large values on {where}."),
    C.LOSS_SCALE_COLLAPSE: (
        "set_precision",
        "The scale fell to its floor: train in bfloat16, or find the overflowing layer.",
    ),
    C.SCALER_MISUSE: ("pause", "unscale_ once before clipping, step and update once an optimizer step."),
    C.TRAINING_INSTABILITY: ("scale_lr", "Lower the learning rate or lengthen its warm-up; clip gradients."),
    C.REPLICA_DIVERGENCE: (
        "rollback",
        "Restore all replicas from one checkpoint; find what wrote {where}'s copy alone.",
    ),
    C.SEED_MISMATCH: ("stop", "Give {where} the seed that the other ranks use and start again."),
    C.CHECKPOINT_STALL: ("profile", "Check the storage path of {where}; save asynchronously or elsewhere."),
    C.CHECKPOINT_CORRUPT: (
        "save_checkpoint",
        "Do not restore from it; save again at once and check the storage of {where}.",
    ),
    C.CHECKPOINT_INCOMPLETE: (
        "save_checkpoint",
        "Save again and verify; restore only checkpoints whose every shard is there.",
    ),
    C.STORAGE_SLOW: ("pause", "Check the shared storage: every rank's checkpoint slowed down together."),
    C.ENV_MISMATCH: ("stop", "Give all ranks the same environment; the evidence names the variable."),
    C.VERSION_MISMATCH: ("stop", "Install the same versions on all nodes; the evidence names the package."),
    C.DEVICE_MISASSIGNED: ("stop", "Set the device from LOCAL_RANK on {where}."),
    C.PARALLEL_CONFIG_INVALID: ("stop", "Make the mesh sizes multiply to the world size (`lanterne plan`)."),
    C.INTERFACE_MISCONFIGURED: ("stop", "Set NCCL_SOCKET_IFNAME / GLOO_SOCKET_IFNAME to an interface all nodes share."),
    C.HOST_MISCONFIGURED: ("restart_without_node", "Compare {where} with a healthy node (`lanterne check`)."),
    C.UNKNOWN: ("none", "Collect what the diagnosis needs; it says what is missing."),
}


def place(subject: Subject) -> str:
    """The subject in words: ``rank 3``, ``host node001``, ``group 0-7`` or ``the job``."""
    if subject.rank is not None:
        return f"rank {subject.rank}"
    if subject.host:
        return f"host {subject.host}"
    return f"group {subject.group}" if subject.group else "the job"


def remedy_for(category: C, subject: Subject) -> Remedy:
    """The remedy of a category, worded for its subject."""
    action, says = TABLE[category]
    return Remedy(action=action, says=says.format(where=place(subject)))
