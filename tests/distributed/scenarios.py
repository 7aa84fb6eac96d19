"""Ways of looking at, changing and leaving a training while updates may be pending, played by `test_pending.py`.

A scenario trains, does what users do between steps and keeps what it saw, by `trainer.see`.
"""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from tests.distributed.reference import Scenario, Trainer
from tests.distributed.trainings import Training, get_case, make_optimizer
from tests.parity import default_step, snapshot
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from wholestep.zoo import Batch


def _held_out(trainer: Trainer) -> Tensor:
    return get_case(trainer.training.case).make_batch(5, 77)["features"]


def model_state_dict(trainer: Trainer) -> None:
    trainer.steps(3)
    trainer.see("state", trainer.model.state_dict())
    trainer.steps(2)


def optimizer_state_dict(trainer: Trainer) -> None:
    trainer.steps(3)
    trainer.see("state", trainer.optimizer.state_dict())
    trainer.steps(2)


def optimizer_state(trainer: Trainer) -> None:
    held = list(trainer.model.parameters())
    trainer.steps(2)
    moment = trainer.optimizer.state[held[0]]["exp_avg"]
    trainer.step()
    trainer.see("held", moment)
    trainer.step()
    trainer.see("state", [trainer.optimizer.state[parameter]["exp_avg"] for parameter in held])
    trainer.steps(1)
    trainer.see("items", [dict(state) for state in trainer.optimizer.state.values()])
    trainer.steps(1)
    trainer.see("count", trainer.optimizer.state[held[-1]]["step"])


def evaluation(trainer: Trainer) -> None:
    trainer.steps(3)
    trainer.model.eval()
    with torch.no_grad():
        trainer.see("evaluation", trainer.model(_held_out(trainer)))
    trainer.model.train()
    trainer.steps(2)
    with torch.no_grad(), trainer.stream.active():
        trainer.see("with dropout", trainer.model(_held_out(trainer)))


def evaluation_of_a_part(trainer: Trainer) -> None:
    trainer.steps(3)
    trainer.see("part", trainer.model.get_submodule("classifier")(torch.ones(2, 32)))
    trainer.steps(2)
    weights: dict[str, Tensor] = {**dict(trainer.model.get_submodule("classifier").named_parameters())}
    other = nn.Linear(32, 10)
    trainer.see("functional", torch.func.functional_call(other, weights, (torch.ones(2, 32),)))


def evaluation_in_inference_mode(trainer: Trainer) -> None:
    """Whoever looks may be in a mode that must not rub off on what is applied then."""
    trainer.steps(3)
    trainer.model.eval()
    with torch.inference_mode():
        trainer.see("evaluation", trainer.model(_held_out(trainer)).clone())
    trainer.model.train()
    tensors = [*trainer.model.parameters(), *(p.grad for p in trainer.model.parameters() if p.grad is not None)]
    tensors += [value for state in trainer.optimizer.state.values() for value in state.values()]
    trainer.see("inference tensors", [int(tensor.is_inference()) for tensor in tensors])
    trainer.steps(2)


def evaluation_under_autocast(trainer: Trainer) -> None:
    trainer.steps(3)
    trainer.model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        trainer.see("evaluation", trainer.model(_held_out(trainer)))
    trainer.model.train()
    trainer.steps(2)


def evaluation_compiled(trainer: Trainer) -> None:
    """Compiled by torch.compile: guards look at parameters without calling a torch function."""
    forward = torch.compile(trainer.model.forward, backend="eager")
    trainer.steps(2)
    for number in range(3):
        trainer.model.eval()
        with torch.no_grad():
            trainer.see(f"evaluation {number}", forward(_held_out(trainer)))
        trainer.model.train()
        trainer.steps(2)


def learning_rate(trainer: Trainer) -> None:
    trainer.steps(3)
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 0.1
    trainer.steps(2)
    trainer.optimizer.param_groups[0]["lr"] = 0.0
    trainer.steps(1)


def learning_rate_scheduler(trainer: Trainer) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, gamma=0.5)
    for _ in range(5):
        trainer.step()
        scheduler.step()


def tensor_learning_rate(trainer: Trainer) -> None:
    trainer.steps(3)
    trainer.optimizer.param_groups[0]["lr"].fill_(1e-3)
    trainer.steps(2)
    trainer.optimizer.param_groups[0]["lr"] = torch.tensor(5e-3)
    trainer.steps(1)


def weight_decay(trainer: Trainer) -> None:
    trainer.steps(3)
    trainer.optimizer.param_groups[0]["weight_decay"] = 0.5
    trainer.steps(2)


def replaced_group(trainer: Trainer) -> None:
    trainer.steps(3)
    trainer.optimizer.param_groups[0].update(lr=1e-3, betas=(0.5, 0.9))
    trainer.steps(2)
    trainer.optimizer.param_groups = [dict(group, lr=1e-4) for group in trainer.optimizer.param_groups]
    trainer.steps(1)


def checkpoint(trainer: Trainer) -> None:
    trainer.steps(3)
    loaded = torch.load(_saved(trainer))
    trainer.see("checkpoint", loaded)
    model, optimizer = trainer.training.build(trainer.rank)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    trainer.use_model(model, optimizer)
    trainer.steps(3)


def _saved(trainer: Trainer) -> io.BytesIO:
    file = io.BytesIO()
    torch.save({"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}, file)
    file.seek(0)
    return file


def whole_model_saved(trainer: Trainer) -> None:
    trainer.steps(3)
    file = io.BytesIO()
    torch.save(trainer.model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    trainer.see("saved", [loaded.state_dict(), [type(parameter).__name__ for parameter in loaded.parameters()]])
    trainer.steps(2)


def distributed_checkpoint(trainer: Trainer) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    trainer.steps(2)
    early = copy.deepcopy(get_state_dict(trainer.model, trainer.optimizer))
    trainer.see("states", early)
    trainer.steps(2)
    set_state_dict(trainer.model, trainer.optimizer, model_state_dict=early[0], optim_state_dict=early[1])
    trainer.steps(2)


def only_rank_0_saves(trainer: Trainer) -> None:
    """The others go on with work pending."""
    trainer.steps(3)
    if trainer.rank == 0:
        trainer.see("checkpoint", torch.load(_saved(trainer)))
    trainer.steps(3)


def only_rank_1_evaluates(trainer: Trainer) -> None:
    trainer.steps(3)
    if trainer.rank == 1:
        trainer.model.eval()
        with torch.no_grad():
            trainer.see("evaluation", trainer.model(_held_out(trainer)))
        trainer.model.train()
    trainer.steps(3)


def another_model(trainer: Trainer) -> None:
    """The compiled step gets a new model, with weights of each rank's own: all ranks must go on with rank 0's."""
    trainer.steps(2)
    for number in range(2):
        torch.manual_seed(10 * number + trainer.rank)
        model = get_case(trainer.training.case).build()
        trainer.use_model(model, make_optimizer(trainer.training.optimizer, model))
        trainer.steps(2)
        trainer.see_all(f"model {number}")


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "clone": lambda p: p.clone(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "numpy array": lambda p: torch.from_numpy(numpy.asarray(p.detach())),
    "item": lambda p: p.view(-1)[0].item(),
    "float": lambda p: float(p.sum()),
    "text": lambda p: repr(p),
    "format": lambda p: f"{p.flatten()[0]:.9f}",
    "arithmetic": lambda p: p * 2 + 1,
    "reflected arithmetic": lambda p: 1 - p,
    "iteration": lambda p: list(p),
    "index": lambda p: p[-1],
    "norm": lambda p: torch.linalg.vector_norm(p),
    "equal": lambda p: int(torch.equal(p, torch.ones_like(p))),
    "copied": lambda p: torch.empty_like(p).copy_(p),
    "second operand": lambda p: torch.zeros_like(p).add_(p),
    "out": lambda p: torch.neg(p.detach(), out=torch.empty(0)),
    "to": lambda p: p.to(torch.float64),
    "foreach": lambda p: torch._foreach_norm([p]),  # pyright: ignore[reportPrivateImportUsage]
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "stack": lambda p: torch.stack([p, p]),
    "storage": lambda p: torch.tensor(p.untyped_storage().tolist(), dtype=torch.uint8),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "deepcopy": lambda p: copy.deepcopy(p),
    "type of a copy": lambda p: type(copy.deepcopy(p)).__name__,
    "type of a pickle": lambda p: type(pickle.loads(pickle.dumps(p))).__name__,
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "gradient": lambda p: p.grad,
}


def parameters_held_in_a_list(trainer: Trainer) -> None:
    """Each way of reading a parameter, with a step before it: the first read after a step is the one that counts."""
    held = list(trainer.model.parameters())
    for index, (name, read) in enumerate(READS.items()):
        trainer.step()
        with torch.no_grad():
            trainer.see(name, read(held[index % len(held)]))


def gradients(trainer: Trainer) -> None:
    held = list(trainer.model.parameters())
    trainer.steps(3)
    trainer.see("gradients", [parameter.grad for parameter in held])
    trainer.steps(2)
    trainer.see("norm", nn.utils.get_total_norm([p.grad for p in held if p.grad is not None]))


def gradients_dropped_between_steps(trainer: Trainer) -> None:
    trainer.steps(3)
    trainer.optimizer.zero_grad()
    trainer.see("state", trainer.model.state_dict())
    trainer.steps(1)
    trainer.model.zero_grad()
    trainer.steps(2)


def copies(trainer: Trainer) -> None:
    """A copy has all updates and a life of its own."""
    trainer.steps(3)
    model, optimizer = copy.deepcopy((trainer.model, trainer.optimizer))
    trainer.see("copy", snapshot(model, optimizer))
    trainer.steps(2)
    with trainer.stream.active():
        trainer.see("copy after two steps of the original", snapshot(model, optimizer))
    alone = copy.deepcopy(trainer.model)
    trainer.see("model alone", alone.state_dict())
    trainer.see("types", [type(parameter).__name__ for parameter in [*model.parameters(), *alone.parameters()]])
    batch = trainer.training.arguments(trainer.rank, 50)[0]
    with trainer.stream.active():
        trainer.see("loss", default_step(get_case(trainer.training.case))(model, optimizer, batch))
    trainer.see("trained copy", model.state_dict())


def loaded_midway(trainer: Trainer) -> None:
    trainer.steps(2)
    early = copy.deepcopy((trainer.model.state_dict(), trainer.optimizer.state_dict()))
    trainer.steps(2)
    trainer.model.load_state_dict(early[0])
    trainer.optimizer.load_state_dict(early[1])
    trainer.steps(2)


def model_loaded_midway(trainer: Trainer) -> None:
    early = copy.deepcopy(trainer.model.state_dict())
    trainer.steps(3)
    trainer.model.load_state_dict(early)
    trainer.see("loaded", trainer.model.state_dict())
    trainer.steps(2)


def optimizer_loaded_midway(trainer: Trainer) -> None:
    trainer.steps(2)
    early = copy.deepcopy(trainer.optimizer.state_dict())
    trainer.steps(2)
    trainer.optimizer.load_state_dict(early)
    trainer.steps(2)


def other_batch_sizes(trainer: Trainer) -> None:
    for size in (4, 4, 4, 6, 6, 4, 3, 4):
        trainer.step(get_case(trainer.training.case).make_batch(size, 100 * trainer.number + trainer.rank))


def changed_in_place(trainer: Trainer) -> None:
    trainer.steps(3)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(0.9)
    trainer.steps(2)
    nn.init.zeros_(trainer.model.get_parameter("classifier.bias"))
    trainer.steps(1)
    trainer.model.get_parameter("classifier.weight").data.add_(0.25)
    trainer.steps(1)


def data_assigned(trainer: Trainer) -> None:
    trainer.steps(3)
    weight = trainer.model.get_parameter("classifier.weight")
    weight.data = weight.data * 0.5
    trainer.steps(2)


def averaged_parameters(trainer: Trainer) -> None:
    """An average follows the model step by step."""
    average = AveragedModel(trainer.model)
    held: list[Tensor] = [*trainer.model.parameters()]
    moving = [parameter.detach().clone() for parameter in held]
    for _ in range(4):
        trainer.step()
        average.update_parameters(trainer.model)
        trainer.step()
        torch._foreach_lerp_(moving, held, weight=0.1)  # pyright: ignore[reportPrivateImportUsage]
    trainer.see("average", [average.state_dict(), moving])


def two_steps_share_a_model(trainer: Trainer) -> None:
    trainer.steps(2)
    trainer.switch_step("clip_norm")
    trainer.steps(2)
    trainer.switch_step("plain")
    trainer.steps(2)


def step_forgotten(trainer: Trainer) -> None:
    trainer.steps(3)
    trainer.forget_step()
    trainer.see("state", trainer.model.state_dict())


def step_forgotten_then_changed(trainer: Trainer) -> None:
    trainer.steps(3)
    trainer.forget_step()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(0.5)


def flushed(trainer: Trainer) -> None:
    trainer.compiled.flush()
    trainer.steps(3)
    trainer.compiled.flush()
    trainer.see("memory", trainer.aliases)
    trainer.compiled.flush()
    trainer.see("memory again", trainer.aliases)
    trainer.steps(2)


def left_with_block(trainer: Trainer) -> None:
    with trainer.compiled:
        trainer.steps(3)
    trainer.see("memory", trainer.aliases)
    with pytest.raises(KeyError):
        _fail_in_with_block(trainer)
    trainer.see("memory after an error", trainer.aliases)
    trainer.steps(1)


def _fail_in_with_block(trainer: Trainer) -> None:
    with trainer.compiled:
        trainer.steps(2)
        raise KeyError("of the user")


def told_which_step_is_last(trainer: Trainer) -> None:
    trainer.steps(2)
    trainer.step(last=True)
    trainer.see("memory", trainer.aliases)
    trainer.steps(2)
    trainer.step(last=True)
    trainer.see("memory at the end", trainer.aliases)


def first_step_is_last(trainer: Trainer) -> None:
    trainer.step(last=True)
    trainer.see("memory", trainer.aliases)
    trainer.steps(2)


def three_steps_and_no_more(trainer: Trainer) -> None:
    trainer.steps(3)
    trainer.see("memory", trainer.aliases)


def user_raises_midway(trainer: Trainer) -> None:
    trainer.steps(3)
    with pytest.raises(ValueError, match="the user's own error"):
        trainer.step(trainer.training.arguments(trainer.rank, 50)[0], True)
    trainer.see("state", trainer.model.state_dict())
    trainer.steps(1)
    with pytest.raises(ValueError, match="the user's own error"):
        trainer.step(trainer.training.arguments(trainer.rank, 51)[0], True)
    trainer.steps(2)


def batch_does_not_fit(trainer: Trainer) -> None:
    trainer.steps(3)
    batch = trainer.training.arguments(trainer.rank, 50)[0]
    # A RuntimeError in eager, a CaptureError with it as its cause when compiled.
    with pytest.raises((RuntimeError, ValueError), match="17"):
        trainer.step(batch | {"features": torch.ones(4, 17)})
    trainer.steps(2)


def _bad_words(trainer: Trainer, key: str) -> Batch:
    batch = trainer.training.arguments(trainer.rank, 50)[0]
    batch[key][-1, -1] = 99
    return batch


def index_out_of_range(trainer: Trainer, key: str) -> None:
    """The graph fails half-way, with some of the pending updates applied: none may be lost or applied twice."""
    trainer.steps(3)
    with pytest.raises(IndexError):
        trainer.step(_bad_words(trainer, key))
    trainer.see("state", [trainer.model.state_dict(), trainer.optimizer.state_dict()])
    trainer.steps(2)
    for _ in range(2):
        with pytest.raises(IndexError):
            trainer.step(_bad_words(trainer, key))
    trainer.steps(2)


token_out_of_range = partial(index_out_of_range, key="tokens")
target_out_of_range = partial(index_out_of_range, key="targets")


def first_step_fails(trainer: Trainer) -> None:
    with pytest.raises(IndexError):
        trainer.step(_bad_words(trainer, "targets"))
    trainer.steps(4)


def eager_step_between(trainer: Trainer) -> None:
    trainer.steps(3)
    batch = trainer.training.arguments(trainer.rank, 50)[0]
    with trainer.stream.active():
        trainer.see("eager step", trainer.train_step(trainer.model, trainer.optimizer, batch))
    trainer.steps(2)


def frozen_midway(trainer: Trainer) -> None:
    trainer.steps(3)
    trainer.model.get_parameter("hidden.0.weight").requires_grad_(False)
    trainer.steps(2)


def parameters_added_midway(trainer: Trainer) -> None:
    trainer.steps(3)
    trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.5})
    trainer.steps(2)


FUSED = Training(optimizer="adamw_fused")

SCENARIOS: dict[str, tuple[Scenario, Training]] = {
    "model.state_dict()": (model_state_dict, FUSED),
    "model.state_dict(), batch norm": (model_state_dict, Training("normed", "sgd")),
    "optimizer.state_dict()": (optimizer_state_dict, FUSED),
    "optimizer.state": (optimizer_state, FUSED),
    "evaluation": (evaluation, FUSED),
    "evaluation of a part": (evaluation_of_a_part, FUSED),
    "evaluation in inference mode": (evaluation_in_inference_mode, FUSED),
    "evaluation under autocast": (evaluation_under_autocast, FUSED),
    # In eval mode it takes a fast path that it refuses to tensors with a torch function.
    "evaluation of an encoder": (evaluation, Training("encoder", "adamw_fused")),
    "learning rate": (learning_rate, FUSED),
    "learning rate, not fused": (learning_rate, Training(optimizer="sgd")),
    "learning rate scheduler": (learning_rate_scheduler, FUSED),
    "learning rate in a tensor": (tensor_learning_rate, Training(optimizer="adamw_tensor_lr")),
    "weight decay": (weight_decay, FUSED),
    "other options": (replaced_group, FUSED),
    "checkpoint": (checkpoint, FUSED),
    "whole model saved": (whole_model_saved, FUSED),
    "distributed checkpoint": (distributed_checkpoint, FUSED),
    "parameters held in a list": (parameters_held_in_a_list, FUSED),
    "gradients": (gradients, FUSED),
    "gradients of a clipped step": (gradients, Training(step="clip_norm")),
    "gradients dropped between steps": (gradients_dropped_between_steps, FUSED),
    "copies": (copies, FUSED),
    "loaded midway": (loaded_midway, FUSED),
    "model loaded midway": (model_loaded_midway, FUSED),
    "optimizer loaded midway": (optimizer_loaded_midway, FUSED),
    "other batch sizes": (other_batch_sizes, FUSED),
    "changed in place": (changed_in_place, FUSED),
    "data assigned": (data_assigned, FUSED),
    "averaged parameters": (averaged_parameters, FUSED),
    "two steps share a model": (two_steps_share_a_model, Training(step="plain")),
    "step forgotten": (step_forgotten, FUSED),
    "step forgotten, then changed": (step_forgotten_then_changed, FUSED),
    "flush()": (flushed, FUSED),
    "with block": (left_with_block, FUSED),
    "last=True": (told_which_step_is_last, FUSED),
    "last=True at once": (first_step_is_last, FUSED),
    "the user raises midway": (user_raises_midway, Training("dry_mlp", step="failing")),
    "a batch that does not fit": (batch_does_not_fit, Training("dry_mlp")),
    "a token out of range": (token_out_of_range, Training("words", "adamw_fused")),
    "a target out of range": (target_out_of_range, Training("words", "adamw_fused")),
    "the first step fails": (first_step_fails, Training("words", "adamw_fused")),
}
# DDP cannot follow a step that is not its own, nor a change of what is trained.
IN_ONE_PROCESS: dict[str, tuple[Scenario, Training]] = {
    "evaluation by torch.compile": (evaluation_compiled, FUSED),
    "eager step between": (eager_step_between, FUSED),
    "frozen midway": (frozen_midway, FUSED),
    "parameters added midway": (parameters_added_midway, FUSED),
}
ON_RANKS: dict[str, tuple[Scenario, Training]] = {
    "only rank 0 saves": (only_rank_0_saves, FUSED),
    "only rank 1 evaluates": (only_rank_1_evaluates, FUSED),
    "another model": (another_model, FUSED),
}
