"""What --dry-run prints: a resolved config and its plan in, text out."""

from __future__ import annotations

from rl_cluster.config.fit import FitConfig
from rl_cluster.config.planning.fit_plan import FitPlan
from rl_cluster.config.planning.machine import GIB
from rl_cluster.config.planning.memory import Memory, kv_cache_tokens
from rl_cluster.config.planning.placement import WorkerPlan
from rl_cluster.config.planning.plan import Plan
from rl_cluster.config.reading.load import dump_config
from rl_cluster.config.run import RunConfig, importance_cap


def describe_plan(config: RunConfig, plan: Plan) -> str:
    """Resolved configuration, derived quantities, workers with CPUs, GPUs and memory, advice."""
    sections = {
        "Configuration": dump_config(config).rstrip(),
        "What follows from it": _derived(config, plan),
        "Workers": _workers(plan),
        "Memory per worker (estimate)": _memory(config, plan),
    }
    if plan.advice:
        sections["Consider"] = "\n".join(f"! {sentence}" for sentence in plan.advice)
    return "\n\n".join(f"{title}\n{'─' * len(title)}\n{body}" for title, body in sections.items())


def describe_fit_plan(config: FitConfig, plan: FitPlan) -> str:
    """As describe_plan, for training on fixed data."""
    run, memory = config.run, plan.workers[0].memory
    rows = {
        "objective": config.objective.name,
        "length": f"{run.steps:,} steps" if run.steps else f"{run.epochs:,} epochs of the data",
        "examples per step": f"{config.batch.rows_per_step:,}",
        "longest sequence": f"{plan.max_length:,} tokens",
        "device": plan.device,
        "backend": config.cluster.backend,
        "model": _model(plan),
    }
    sections = {
        "Configuration": dump_config(config).rstrip(),
        "What follows from it": _aligned(rows),
        "Workers": _workers(plan),
        "Memory per worker (estimate)": _sum(memory) if memory else "unknown, as the model's size is",
    }
    return "\n\n".join(f"{title}\n{'─' * len(title)}\n{body}" for title, body in sections.items())


def _derived(config: RunConfig, plan: Plan) -> str:
    d = plan.derived
    mode = "synchronous" if plan.synchronous else f"up to {config.asynchrony.max_policy_lag} versions behind"
    rows = {
        "groups per step": f"{d.groups_per_step:,}",
        "sequences per step": f"{d.sequences_per_step:,}",
        "generated tokens per step": f"at most {d.max_generated_tokens_per_step:,}",
        "tokens per step, prompts included": f"at most {d.max_tokens_per_step:,}",
        "longest sequence": f"{d.max_sequence_tokens:,} tokens ({d.max_prompt_tokens:,} of prompt)",
        "updates per step": f"{d.updates_per_step:,} of {d.sequences_per_update:,} sequences",
        "micro-batches per update and rank": f"at most {d.max_micro_batches_per_update:,}",
        "updates of the whole run": f"{d.total_updates:,}",
        "sequences of the whole run": f"{d.total_sequences:,}",
        "mode": mode,
        "importance weights": "none" if (cap := importance_cap(config)) is None else f"at most {cap:g}",
        "backend": {"ray": "ray", "local": "local: one process plays all roles below, in turn"}[
            config.cluster.backend
        ],
        "device": plan.device,
        "weights travel by": plan.sync_backend + (" (adapters only)" if plan.adapters_only else ""),
        "reference": plan.reference.replace("_", " "),
        "critic": plan.critic,
        "model": _model(plan),
    }
    return _aligned(rows)


def _model(plan: Plan | FitPlan) -> str:
    shape = plan.shape
    if shape is None:
        return "size unknown: its config.json is not on this machine"
    return (
        f"{_millions(shape.num_parameters)} parameters, {shape.num_layers} layers, "
        f"hidden {shape.hidden_size}, vocabulary {shape.vocab_size:,}; from {shape.source}"
    )


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _workers(plan: Plan | FitPlan) -> str:
    machine = plan.machine
    nodes = f"{machine.num_nodes} × " if machine.num_nodes > 1 else ""
    gpus = f", {machine.gpus} GPUs of {machine.gpu_memory / GIB:.0f} GiB" if machine.gpus else ", no GPU"
    head = f"machine: {nodes}{machine.cores} cores{gpus}"
    header = ("worker", "node", "threads", "CPUs claimed", "GPUs", "memory")
    return "\n".join([head, *_table([header, *(_worker_row(worker) for worker in plan.workers)])])


def _worker_row(worker: WorkerPlan) -> tuple[str, ...]:
    shared = f" ({worker.num_gpus:g} claimed)" if worker.gpus and worker.num_gpus != len(worker.gpus) else ""
    return (
        worker.name,
        str(worker.node),
        str(worker.threads),
        f"{worker.num_cpus:g}",
        ",".join(map(str, worker.gpus)) + shared if worker.gpus else "-",
        _gib(worker.memory.total) if worker.memory else "unknown",
    )


def _memory(config: RunConfig, plan: Plan) -> str:
    """One line per role: all workers of a role are alike."""
    lines = []
    for role in dict.fromkeys(worker.role for worker in plan.workers):
        memory = plan.of(role)[0].memory
        lines.append(f"{role}: {_sum(memory)}" if memory else f"{role}: unknown, as the model's size is")
    engine = plan.of("rollout")[0].memory
    if plan.shape is not None and engine is not None:
        kv_bytes = dict(engine.parts)["KV cache"]
        tokens = kv_cache_tokens(plan.shape, config.model.dtype, kv_bytes)
        lines.append(f"the KV cache of an engine holds about {tokens:,} tokens")
    lines.append("formulas: rl_cluster/config/planning/memory.py")
    return "\n".join(lines)


def _sum(memory: Memory) -> str:
    parts = " + ".join(f"{name} {_gib(size)}" for name, size in memory.parts)
    where = "GPU" if memory.on_gpu else "RAM"
    return f"{_gib(memory.total)} of {where} = {parts}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def _aligned(rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
