"""Steps that cannot be captured: a sentence with the user's line and what to do, and nothing has been touched."""

import functools
import gc
import inspect
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.parity import differences
from tests.twins import SmallNet, Twins, World, adam, is_captured, mse_step, observe, pair, small_world
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

import wholestep
from wholestep import CaptureError, WholestepError

X, Y = pair()
Step = Callable[..., Any]
ORIGINALS = (torch.autograd.backward, Optimizer.zero_grad, nn.Module.zero_grad, LRScheduler.step)
VALUE_ADVICE = "return the tensor and read it after the call, or use torch.where / torch.clamp"


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was() -> Iterator[None]:
    yield
    assert (torch.autograd.backward, Optimizer.zero_grad, nn.Module.zero_grad, LRScheduler.step) == ORIGINALS
    assert not torch.compiler.is_compiling()
    assert gc.isenabled()
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert torch.is_grad_enabled()


def known(world: World) -> dict[str, Tensor]:
    """What `observe` sees, without tensors that have no values."""
    modules = [value for value in vars(world).values() if isinstance(value, nn.Module)]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
        return {}
    return {name: value for name, value in observe(world).items() if value.device.type != "meta"}


def attributes(world: World) -> list[list[str]]:
    """Names of everything on every module: a failed capture leaves nothing behind there."""
    modules = [value for value in vars(world).values() if isinstance(value, nn.Module)]
    return [sorted(vars(submodule)) for module in modules for submodule in module.modules()]


def with_model(world: World, step: Step, *args: Any) -> Any:
    return step(world.model, world.optimizer, *args)


def marked_line(function: Step) -> str:
    """`file:line` of the line of a function that says it is refused."""
    lines, first = inspect.getsourcelines(inspect.unwrap(function))
    [offset] = [offset for offset, line in enumerate(lines) if "# refused" in line]
    return f"{__file__}:{first + offset}"


def assert_refused(
    step: Step,
    *messages: str,
    build: Callable[[], World] | None = None,
    args: tuple[Any, ...] = (X, Y),
    call: Step = with_model,
    line: str | None = None,
    trains_eagerly: bool = True,
    error: type[WholestepError] = CaptureError,
) -> WholestepError:
    """The call raises, says what is expected, touches nothing, and the same model still trains like an untouched one.

    The optimizer has taken a step before, so that gradients and state exist; it is called twice, as users would.
    """
    build = build or small_world()
    torch.manual_seed(0)
    world = build()
    torch.manual_seed(0)
    untouched = build()
    if trains_eagerly:
        train_eagerly(world, untouched)
    compiled = wholestep.compile(step)
    before, names, rng = known(world), attributes(world), torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(error) as caught:
            call(world, compiled, *args)
        for message in (*messages, *([line] if line else [])):
            assert message in str(caught.value)
        assert differences(before, known(world)) == []
        assert names == attributes(world)
        assert torch.equal(rng, torch.get_rng_state())
        assert not torch.compiler.is_compiling()
    assert compiled.num_captures == 0
    if trains_eagerly:
        train_eagerly(world, untouched)
        train_eagerly(world, untouched)
    return caught.value


def train_eagerly(world: World, untouched: World) -> None:
    for side in (world, untouched):
        torch.manual_seed(7)
        mse_step(side.model, side.optimizer, X, Y)
    assert differences(known(untouched), known(world)) == []


# Values that Python wants to see


def branches(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(features), targets)
    if loss > 1:  # refused
        loss = loss * 2
    loss.backward()
    optimizer.step()
    return loss


def loops(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    loss = mse_step(model, optimizer, features, targets)
    while loss > 1:  # refused
        loss = loss / 2
    return loss


def compares_an_item(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> int:
    loss = mse_step(model, optimizer, features, targets)
    return 2 if loss.item() > 1 else 3  # refused


def counts_by_an_item(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> int:
    loss = mse_step(model, optimizer, features, targets)
    return len(range(int(loss * 100)))  # refused


def scales_by_an_item(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    loss = mse_step(model, optimizer, features, targets)
    return loss * max(0, loss.item())  # refused


def prints(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    loss = mse_step(model, optimizer, features, targets)
    print(loss)  # refused
    return loss


def formats(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> str:
    loss = mse_step(model, optimizer, features, targets)
    return f"{loss.expand(2)}"  # refused


def logs(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    loss = mse_step(model, optimizer, features, targets)
    logging.getLogger("tests").critical(str(loss))  # refused
    return loss


def to_numpy(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
    loss = mse_step(model, optimizer, features, targets)
    return loss.numpy(force=True)  # refused


def indexes_a_list(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
    loss = mse_step(model, optimizer, features, targets)
    return [1, 2, 3][loss.long()]  # refused


class BranchingInside(SmallNet):
    def forward(self, features: Tensor) -> Tensor:
        if self.first.weight.mean() > 0:  # refused
            features = features * 2
        return super().forward(features)


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    "step",
    [
        branches,
        loops,
        compares_an_item,
        counts_by_an_item,
        scales_by_an_item,
        prints,
        formats,
        logs,
        to_numpy,
        indexes_a_list,
    ],
)
def test_values_are_only_known_when_the_step_runs(step: Step, capsys: pytest.CaptureFixture[str]) -> None:
    error = assert_refused(
        step, "needs a value that is only known when the step runs", VALUE_ADVICE, line=marked_line(step)
    )
    assert isinstance(error, CaptureError)
    assert error.location == marked_line(step)
    assert error.advice is not None
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (compares_an_item, "a comparison"),
        (counts_by_an_item, "use as an index"),
        (scales_by_an_item, "use of a number"),
        (prints, "printing a tensor"),
        (formats, "formatting a number"),
        (to_numpy, ".numpy()"),
        (indexes_a_list, "use as an index"),
        (branches, "an `if`, `while`, `and` or bool() on a tensor"),
    ],
)
def test_the_message_says_what_asked(step: Step, what: str) -> None:
    world = small_world()()
    with pytest.raises(CaptureError) as caught:
        wholestep.compile(step)(world.model, world.optimizer, X, Y)
    assert f": {what} needs a value" in str(caught.value)


def test_a_branch_inside_the_model_is_found_there() -> None:
    assert_refused(
        mse_step,
        "only known when the step runs",
        build=small_world(BranchingInside),
        line=marked_line(BranchingInside.forward),
    )


def compares(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
    return torch.equal(mse_step(model, optimizer, features, targets), targets)  # refused


def test_comparisons_of_whole_tensors() -> None:
    message = "depends on a value that is only known when it runs"
    assert_refused(compares, message, "Use torch.where", line=marked_line(compares))


def test_the_optimizer_is_not_blamed_for_what_follows_it() -> None:
    assert_refused(compares, "the step depends on a value that is only known when it runs")


def asks_for_the_address(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
    return mse_step(model, optimizer, features, targets).data_ptr()  # refused


def test_memory_that_does_not_exist_while_capturing() -> None:
    assert_refused(asks_for_the_address, "nothing has been changed", line=marked_line(asks_for_the_address))


# Models and optimizers


def test_a_parameter_on_another_device() -> None:
    def make_model() -> nn.Module:
        model = SmallNet()
        model.second = nn.Linear(5, 3, device="meta")
        return model

    assert_refused(
        mse_step,
        "same device",
        "nothing has been changed",
        build=small_world(make_model),
        line=marked_line_of_second_layer(),
        trains_eagerly=False,
    )


def marked_line_of_second_layer() -> str:
    lines, first = inspect.getsourcelines(SmallNet.forward)
    [offset] = [offset for offset, line in enumerate(lines) if "self.second" in line]
    return f"{inspect.getsourcefile(SmallNet)}:{first + offset}"


def test_a_batch_on_another_device() -> None:
    assert_refused(mse_step, "meta", args=(X.to("meta"), Y))


def test_an_optimizer_of_another_model() -> None:
    def build() -> World:
        world = World(model=SmallNet(), other=SmallNet())
        world.optimizer = adam(world.other.parameters())
        return world

    assert_refused(
        mse_step,
        "Adam.step() would update nothing: none of its 4 parameters has a gradient in this step",
        "Build the optimizer from the parameters of the model that the step trains",
        build=build,
    )


def test_no_model_at_all() -> None:
    def step(features: Tensor, targets: Tensor) -> Tensor:
        return features.sum() + targets.sum()

    error = assert_refused(
        step,
        "no torch.nn.Module is among the arguments, closure or globals of",
        "Pass the model as an argument of the train step",
        call=lambda world, step, *args: step(*args),
    )
    assert f"{__file__}:{step.__code__.co_firstlineno}" in str(error)


def test_a_trainable_tensor_of_no_model() -> None:
    class Box:
        __slots__ = ("weight",)

    box = Box()
    box.weight = nn.Parameter(torch.ones(3))

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(lambda inputs: model(inputs) * box.weight, optimizer, features, targets)

    assert_refused(
        step,
        "the step uses a trainable tensor of shape [3] that belongs to no model it was given",
        "Pass the module that owns it as an argument of the train step",
    )


def test_a_data_parallel_model() -> None:
    def build() -> World:
        model = SmallNet()
        return World(model=nn.DataParallel(model), optimizer=adam(model.parameters()))

    assert_refused(mse_step, "'model' is wrapped in DataParallel", "Pass the plain module (model.module)", build=build)


def test_sparse_gradients() -> None:
    def build() -> World:
        model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(0, 1), nn.Linear(4, 3))
        return World(model=model, optimizer=SGD(model.parameters(), lr=0.1))

    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert_refused(
        mse_step,
        "the gradient of '0.weight' is sparse. Use dense gradients",
        build=build,
        args=(tokens, Y),
        trains_eagerly=False,
    )


@pytest.mark.parametrize("has_state", [False, True])
def test_a_lazy_module(has_state: bool) -> None:
    def build() -> World:
        model = nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 3))
        if has_state:
            model(X)
        return World(model=model, optimizer=SGD(model.parameters(), lr=0.1))

    if has_state:
        Twins(build, mse_step).steps(2, X, Y)
        return
    world = build()
    with pytest.raises(CaptureError) as caught:
        wholestep.compile(mse_step)(world.model, world.optimizer, X, Y)
    assert "param.0.weight is a UninitializedParameter" in str(caught.value)
    assert "Initialise lazy modules with one forward call first" in str(caught.value)
    assert isinstance(world.model[0].weight, UninitializedParameter)
    mse_step(world.model, world.optimizer, X, Y)
    assert world.model[0].weight.shape == (5, 4)


def test_an_optimizer_that_searches() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(model(features), targets)
            loss.backward()
            return loss

        return optimizer.step(closure)

    world = small_world(make_optimizer=torch.optim.LBFGS)()
    before = known(world)
    with pytest.raises(CaptureError, match=r"LBFGS"):
        wholestep.compile(step)(world.model, world.optimizer, X, Y)
    assert differences(before, known(world)) == []


class Careful(SGD):
    """Leaves parameters alone whose gradients are large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad.abs().max() < 10:
                parameter.sub_(parameter.grad, alpha=0.1)


def test_an_optimizer_that_branches_on_gradients() -> None:
    build = small_world(make_optimizer=functools.partial(Careful, lr=0.01))
    assert_refused(mse_step, "depends on a value that is only known when it runs", build=build)


# Schedulers


def test_a_scheduler_that_looks_at_the_loss_inside_the_step() -> None:
    def build() -> World:
        world = small_world()()
        world.scheduler = ReduceLROnPlateau(world.optimizer)
        return world

    def step(model: nn.Module, optimizer: Optimizer, scheduler: Any, features: Tensor, targets: Tensor) -> Tensor:
        loss = mse_step(model, optimizer, features, targets)
        scheduler.step(loss)  # refused
        return loss

    assert_refused(
        step,
        "a learning rate scheduler that looks at a value is stepped inside the train step",
        "Return the value and call scheduler.step(value) after the compiled step",
        build=build,
        call=lambda world, step, *args: step(world.model, world.optimizer, world.scheduler, *args),
        line=marked_line(step),
    )


# Exceptions of the user's own code


def assert_raises_as_eager(twins: Twins, kind: type[Exception], *args: Any) -> None:
    """Both sides raise the same error, and leave the same behind."""
    told: list[tuple[type, str]] = []
    for world, function in zip(twins.worlds, (twins.eager, twins.compiled), strict=True):
        with pytest.raises(kind) as caught:
            function(world.model, world.optimizer, *args)
        told.append((type(caught.value), str(caught.value)))
    assert told[0] == told[1]
    assert differences(*map(observe, twins.worlds)) == []


def test_an_exception_after_the_update() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        mse_step(model, optimizer, features, targets)
        raise RuntimeError("out of luck\nand more")

    twins = Twins(small_world(), step)
    for _ in range(2):
        assert_raises_as_eager(twins, RuntimeError, X, Y)


def test_an_exception_in_the_middle_of_the_optimizer() -> None:
    class Failing(SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1)
            self.state[self.param_groups[0]["params"][0]]["marked"] = torch.zeros(())
            raise ZeroDivisionError("halfway")

    twins = Twins(small_world(make_optimizer=functools.partial(Failing, lr=0.1)), mse_step)
    assert_raises_as_eager(twins, ZeroDivisionError, X, Y)


def test_an_exception_that_eager_does_not_raise() -> None:
    """It is known after eager has run: that call is eager's, the next one is refused, and nothing stays behind."""

    class Caching(SmallNet):
        def forward(self, features: Tensor) -> Tensor:
            if is_captured():
                self.cache = features * torch.rand(())
                self.register_buffer("late", torch.ones(1))
                raise KeyError("missing")  # refused
            return super().forward(features)

    twins = Twins(small_world(Caching), mse_step)
    twins.step(X, Y)
    assert twins.compiled.num_eager_calls == 1
    world = twins.worlds[1]
    before, names = known(world), attributes(world)
    with pytest.raises(CaptureError, match="KeyError: 'missing'") as caught:
        twins.compiled(world.model, world.optimizer, X, Y)
    assert marked_line(Caching.forward) in str(caught.value)
    assert differences(before, known(world)) == []
    assert attributes(world) == names


def test_a_keyboard_interrupt_is_not_swallowed() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        mse_step(model, optimizer, features, targets)
        raise KeyboardInterrupt

    world = small_world()()
    before = known(world)
    with pytest.raises(KeyboardInterrupt):
        wholestep.compile(step)(world.model, world.optimizer, X, Y)
    assert differences(before, known(world)) == []


def test_another_key_in_the_batch() -> None:
    def step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
        return mse_step(model, optimizer, batch["features"], batch["targets"])

    twins = Twins(small_world(), step)
    twins.step({"features": X, "targets": Y})
    assert_raises_as_eager(twins, KeyError, {"features": X, "labels": Y})
    twins.step({"features": X, "targets": Y})
    assert twins.num_captures == 1


@pytest.mark.parametrize("features", [X.double(), X.long(), X.bool()])
def test_another_dtype_in_the_batch(features: Tensor) -> None:
    twins = Twins(small_world(), mse_step)
    twins.step(X, Y)
    world = twins.worlds[1]
    before = known(world)
    with pytest.raises(CaptureError, match=r"would multiply tensors of .* in module 'first'. Convert the batch"):
        twins.compiled(world.model, world.optimizer, features, Y)
    assert differences(before, known(world)) == []
    twins.step(X, Y)
    assert twins.num_captures == 1


def test_an_error_while_the_graph_runs() -> None:
    """Torch's own error, as in eager; parameters and state are not half updated and training can go on."""

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
        return loss

    twins = Twins(small_world(lambda: nn.Sequential(nn.Dropout(0.2), SmallNet())), step)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    twins.step(X, labels)
    for world, function in zip(twins.worlds, (twins.eager, twins.compiled), strict=True):
        torch.manual_seed(4)
        with pytest.raises(IndexError, match="out of bounds"):
            function(world.model, world.optimizer, X, labels + 2)
    assert differences(*map(observe, twins.worlds)) == []
    twins.steps(2, X, labels)
    assert twins.num_captures == 1


def test_a_batch_of_the_wrong_shape() -> None:
    assert_raises_as_eager(Twins(small_world(), mse_step), RuntimeError, X[:, :3], Y)


def test_missing_arguments() -> None:
    assert_raises_as_eager(Twins(small_world(), mse_step), TypeError, X)


# Tensors that cannot be inputs


def test_an_argument_with_a_history() -> None:
    world = small_world()()
    targets = (Y.clone().requires_grad_() * 2).sum(1, keepdim=True).expand(6, 3)
    before = known(world)
    with pytest.raises(CaptureError) as caught:
        wholestep.compile(mse_step)(world.model, world.optimizer, X, targets)
    assert "targets has a grad_fn" in str(caught.value)
    assert "pass targets.detach()" in str(caught.value)
    assert differences(before, known(world)) == []


class Wrapped(Tensor):
    """A tensor subclass."""


def test_a_tensor_subclass() -> None:
    assert_refused(
        mse_step,
        "batch.features is a Wrapped, a tensor subclass that cannot be traced",
        "Pass it as a plain tensor",
        args=(X.as_subclass(Wrapped), Y),
    )


def test_a_sparse_argument() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(model, optimizer, features, targets.to_dense())

    assert_refused(step, "batch.targets has layout torch.sparse_coo", "Only dense", args=(X, Y.to_sparse()))


# Where and how it is called


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_without_gradients(mode: Any) -> None:
    def call(world: World, step: Step, *args: Any) -> Any:
        with mode():
            return step(world.model, world.optimizer, *args)

    assert_refused(mse_step, "does not require grad", call=call)


def test_a_compiled_step_inside_a_compiled_step() -> None:
    assert_refused(wholestep.compile(mse_step), "a compiled step calls another one (mse_step)")


@pytest.mark.parametrize("fn", [3, "step", small_world()().model.first.weight])
def test_what_is_no_function(fn: Any) -> None:
    with pytest.raises(WholestepError, match=r"takes a train step \(a function\), not a"):
        wholestep.compile(fn)


def test_a_pipeline_that_does_not_parse() -> None:
    with pytest.raises(wholestep.PassError, match=r"there is no pass 'simplfy'; known passes: .*simplify"):
        wholestep.compile(mse_step, passes="simplfy")


# Changes to Python state inside the step


def makes_the_rate_a_tensor(model: SmallNet, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    loss = mse_step(model, optimizer, features, targets)
    optimizer.param_groups[0]["lr"] = 0.1 * loss.detach()
    return loss


def forgets_its_state(model: SmallNet, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    loss = mse_step(model, optimizer, features, targets)
    optimizer.state.clear()
    return loss


def replaces_a_parameter(model: SmallNet, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    loss = mse_step(model, optimizer, features, targets)
    model.first.weight = nn.Parameter(torch.ones(5, 4))
    return loss


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (makes_the_rate_a_tensor, "the step gives optimizer (SGD) a learning rate that is no plain number"),
        (forgets_its_state, "the step removes state of optimizer. Reset optimizer state outside the step"),
        (replaces_a_parameter, "the step replaces parameter 'first.weight'"),
    ],
)
def test_changes_to_python_state(step: Step, message: str) -> None:
    assert_refused(step, message, __file__)


@pytest.mark.parametrize(
    ("compute", "message"),
    [(lambda square: square.to_sparse().to_dense(), "_to_sparse makes a tensor with layout torch.sparse_coo")],
)
def test_operators_that_no_trace_can_hold(compute: Any, message: str) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        hidden = model(x)
        loss = compute(hidden.T @ hidden + torch.eye(3)).sum()
        loss.backward()
        optimizer.step()
        return loss

    model = nn.Linear(4, 3)
    with pytest.raises(CaptureError, match=rf"{Path(__file__).name}:\d+: {message}"):
        wholestep.compile(step)(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(5, 4))
