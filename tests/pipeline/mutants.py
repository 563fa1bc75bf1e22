"""Ways to get the pipeline wrong, each applied to a copy of the sources; a test must fail for every one.

    python tests/pipeline/mutants.py [TEXT]      # only mutants whose file or text contains TEXT

Prints a verdict per mutant and exits with 1 if one survives.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import safetensors.torch  # noqa: F401  (loaded once, before the forks)
import torch  # noqa: F401
from transformers import GPT2LMHeadModel, Qwen2ForCausalLM  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 120.0
# file of rl_cluster/pipeline, the text (once in it), what it becomes, the test file that must notice
MUTANTS = [
    ("losses.py", "clip_low=1.0, clip_high=UNBOUNDED", "clip_low=0.2, clip_high=0.2", "losses"),
    ("losses.py", "clip_low=min(clip, 1.0)", "clip_low=0.2", "losses"),
    ("losses.py", "clip_high=clip", "clip_high=0.2", "losses"),
    ("losses.py", '"clip_param", 0.2, above', '"clip_param", 0.3, above', "losses"),
    ("losses.py", '"entropy_coef", 0.01', '"entropy_coef", 0.0', "losses"),
    ("losses.py", '"value_loss_coef", 0.5', '"value_loss_coef", 1.0', "losses"),
    ("losses.py", "clip_value=value_clip", "clip_value=UNBOUNDED", "losses"),
    ("losses.py", "tokens.trained & self.mask", "tokens.trained", "losses"),
    ("losses.py", 'if "returns" in columns else 0.0', "", "losses"),
    (
        "losses.py",
        'OLD_LOGPROBS = ("old_logprobs", "old_log_probs")',
        'OLD_LOGPROBS = ("old_logprobs",)',
        "losses",
    ),
    ("losses.py", "require_trained(tokens, loss.mask)", "pass", "bad_input"),
    ("losses.py", "_require_finite(loss, tokens)\n    return", "return", "bad_input"),
    ("inputs.py", "trained[:, 0] = False", "pass", "losses"),
    ("inputs.py", "trained &= mask", "pass", "losses"),
    ("inputs.py", "trained[:, 1:] &= mask[:, :-1]", "pass", "losses"),
    ("inputs.py", ".cumsum(-1) - 1", ".cumsum(-1)", "losses"),
    ("inputs.py", "if not self.left_padded or", "if True or", "losses"),
    ("inputs.py", "value.detach().clone()", "value.detach()", "order"),
    ("inputs.py", "has_label = labels != IGNORED", "has_label = labels != -1", "losses"),
    ("inputs.py", "trained = own.to(ids.device) != IGNORED", "pass", "accumulation"),
    ("model_call.py", "logits[rows, places - 1]", "logits[rows, places]", "losses"),
    ("model_call.py", "picked / temperature", "picked * temperature", "losses"),
    ("model_call.py", "- logits_AV.logsumexp(-1)", "", "losses"),
    ("model_call.py", "return -(logprobs.exp()", "return (logprobs.exp()", "losses"),
    ("model_call.py", 'arguments["attention_mask"] = tokens', "_ = tokens", "losses"),
    ("model_call.py", 'arguments["position_ids"] = tokens', "_ = tokens", "losses"),
    ("model_call.py", "part.training = mode", "part.training = True", "sampling"),
    ("model_call.py", "module.eval()\n", "pass\n", "sampling"),
    ("model_call.py", "if not bool(loss.isfinite()):", "if False:", "failure"),
    ("loss_run.py", "[rows, places - 1]", "[rows, places]", "losses"),
    ("loss_run.py", "1.0 / count", "1.0 / len(trained)", "losses"),
    ("loss_run.py", "weight or max(num_tokens", "1.0 or max(num_tokens", "accumulation"),
    ("loss_run.py", "float(returned.weight), ", "1.0, ", "accumulation"),
    ("loss_run.py", "or returned.dim() != 0:", "or False:", "bad_input"),
    ("torch_backend.py", "new.mul_(weight / total)", "pass", "accumulation"),
    ("torch_backend.py", "alpha=before / total", "alpha=1.0", "accumulation"),
    ("torch_backend.py", "parameter.grad = old * (before / total)", "parameter.grad = old", "accumulation"),
    ("torch_backend.py", "parameter.grad = None\n            run", "pass\n            run", "accumulation"),
    ("torch_backend.py", "if calls < request.min_calls:", "if calls == 0:", "accumulation"),
    ("torch_backend.py", "self.step += finite", "self.step += 1", "failure"),
    (
        "torch_backend.py",
        "                if scheduler is not None:\n                    scheduler.step()\n",
        "",
        "optim_step",
    ),
    ("torch_backend.py", "writable = parameters if", "writable = [] if", "failure"),
    (
        "torch_backend.py",
        "owned_parameters(optimizer), optimizer, scheduler):\n            self._claim",
        "[], None, None):\n            self._claim",
        "failure",
    ),
    (
        "torch_backend.py",
        "        self._forget_if_zeroed()\n        parameters",
        "        parameters",
        "accumulation",
    ),
    ("torch_backend.py", "optimizer.load_state_dict(self._unclaimed", "dict(self._unclaimed", "state"),
    ("optimizing.py", "min(1.0, max_norm / (norm + 1e-6))", "max_norm / (norm + 1e-6)", "optim_step"),
    ("optimizing.py", "parameter.grad * factor", "parameter.grad", "optim_step"),
    ("rollback.py", "parameter.grad = gradient", "pass", "failure"),
    ("rollback.py", "tensor.copy_(saved)", "pass", "failure"),
    ("rollback.py", "*module.buffers()]", "]", "failure"),
    ("rollback.py", "part.training = mode", "pass", "failure"),
    ("rollback.py", "        self._random.restore()", "        pass", "failure"),
    ("rollback.py", "self._optimizer_state.restore(self._optimizer)", "pass", "failure"),
    ("rollback.py", "self._scheduler.load_state_dict(self._scheduler_state)", "pass", "failure"),
    ("rollback.py", "optimizer.state.clear()", "pass", "failure"),
    ("rollback.py", "value, value.detach().clone() if", "value, value if", "failure"),
    ("future.py", "ThreadPoolExecutor(1,", "ThreadPoolExecutor(2,", "order"),
    ("future.py", "return self._holder == threading.get_ident()", "return False", "order"),
    ("future.py", "    with turn:\n        return call()", "    return call()", "order"),
    ("future.py", "_TURNS.setdefault(model, Turn())", "Turn()", "order"),
    ("future.py", "cancel_futures=cancel_pending", "cancel_futures=False", "order"),
    ("future.py", "                raise  # the call's own", "                pass", "order"),
    ("../modeling/drawing.py", "before >= top_p", "before > 1.0", "sampling"),
    (
        "../modeling/drawing.py",
        "before = probabilities.cumsum(-1) - probabilities",
        "before = probabilities.cumsum(-1)",
        "sampling",
    ),
    ("sampling.py", "scaled = logits / temperature", "scaled = logits", "sampling"),
    ("sampling.py", "truncated(scaled, top_k, top_p).softmax", "scaled.softmax", "sampling"),
    (
        "sampling.py",
        "float(scaled.log_softmax(-1)[token])",
        "float(logits.log_softmax(-1)[token])",
        "sampling",
    ),
    ("sampling.py", "generator=generator", "generator=None", "sampling"),
    ("sampling.py", "if token in request.stop_token_ids or", "if", "sampling"),
    ("sampling.py", "feed = torch.tensor([[token]]", "feed = torch.tensor([[tokens[0]]]", "sampling"),
    ("arguments.py", "(eos_token_ids, ()) if stop is None", "((), ()) if stop is None", "sampling"),
    ("pipeline.py", "            torch.set_rng_state(random)  # the seed was drawn from it\n", "", "failure"),
    ("torch_state.py", "gradients if state.accumulation.calls > 0 else {}", "{}", "state"),
    ("torch_state.py", '        scheduler.load_state_dict(saved["scheduler"])', "        pass", "state"),
    ("torch_state.py", "    ).restore()\n", "    )\n", "state"),
    ("checkpoint_folder.py", "old.rename(folder)", "pass", "state"),
    ("checkpoint_folder.py", "shutil.rmtree(fresh, ignore_errors=True)", "pass", "state"),
    ("client.py", "copy.deepcopy(model)", "model", "client"),
    ("client.py", "frozen.requires_grad_(False)", "pass", "client"),
    ("client.py", "return self._reference.forward(", "return self.pipeline.forward(", "client"),
    ("learner_backend.py", "weight = 1.0 / self.accumulation.weight", "weight = 1.0", "learner"),
    (
        "learner_backend.py",
        "        self._kept.clear()\n        self.accumulation.clear()\n        self.step += not",
        "        self.accumulation.clear()\n        self.step += not",
        "learner",
    ),
    ("learner_backend.py", "if self._published != self.step:", "if self._published is None:", "learner"),
    ("learner_backend.py", "reference=reference)", "reference=False)", "learner"),
    (
        "learner_batch.py",
        "np.where(self.trained, weight, 0.0)",
        "np.full(len(self.trained), weight)",
        "learner",
    ),
]


def survives(file: str, old: str, new: str, tests: str | None) -> bool:
    """True if the test file (None: all of the folder) passes with the mutation."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("rl_cluster", "tests/pipeline"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("tests/fakes.py", "pyproject.toml"):
            shutil.copy(ROOT / name, copy / name)
        path = copy / "rl_cluster" / "pipeline" / file
        source = path.read_text()
        assert source.count(old) == 1, f"{file}: {old!r} stands {source.count(old)} times"
        path.write_text(source.replace(old, new))
        target = "tests/pipeline" if tests is None else f"tests/pipeline/test_pipeline_{tests}.py"
        # A forked child has the heavy libraries loaded already, and none of the project's own modules.
        child = os.fork()
        if child == 0:
            os._exit(_run_tests(copy, target))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 1), f"{file}: {old!r}: pytest ended with {code}"
        return code == 0


def _run_tests(copy: Path, target: str) -> int:
    # A mutant may deadlock; that is noticed too.
    threading.Timer(DEADLINE_SECONDS, os._exit, (1,)).start()
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    with (copy / "output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--timeout=100", target]))


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    survivors = 0
    for file, old, new, tests in MUTANTS:
        if wanted in file or wanted in old:
            alive = survives(file, old, new, tests)
            survivors += alive
            print("SURVIVED" if alive else "killed  ", file, repr(old), "->", repr(new), flush=True)
    print(f"{survivors} survived")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
