"""Runs a layer by its plan, forward and backward.

To autograd a layer is one node. Its forward runs the operators in the order of the schedule; each `Compute` leaves an
autograd graph of its own, cut from the others, so that backward runs operators in the order of its schedule too. What
such a graph saves is not held by it but looked up by name when it is needed: it may have been freed and made again.

Communication is asynchronous: between the start and the wait of an exchange other operators run. Rejected: autograd's
own order with hooks. It runs what was made last first, and there is no place to put work behind an exchange.

With `Turns`, two micro-batches of a step run in turns: while one waits for an exchange, the other one computes (others
call this dual-batch overlap). Each runs in a thread of its own, one at a time: a thread goes on until it gives way or
ends. So which one runs when depends on the schedule and not on time, and all ranks begin their collectives in the same
order. Rejected: generators. Backward runs within autograd, which cannot be left and entered again.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from antiphon.comm.collectives import Collective, Flight
from antiphon.kernels.ops import differentiable
from antiphon.train.layer_plan import LayerPlan, records_again
from antiphon.train.layer_schedule import (
    GRADIENT,
    START,
    WAIT,
    WAIT_AGAIN,
    WAIT_GRADIENT,
    WEIGHTS,
    Action,
    span_name,
)
from antiphon.train.operators import (
    Compute,
    HeldBytes,
    LayerContext,
    Operator,
    OperatorGraph,
    RowExchange,
    WeightProduct,
    by_name,
    bytes_of,
)
from antiphon.train.tiled import Tiled, TiledRun


class Turns:
    """The turns of one model. `together` is called by the thread that trains, `give_way` by those it starts; by others
    it does nothing."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working: list[int] = []  # those that have not ended; the first one's turn it is
        self._own = threading.local()
        self._is_over = False

    def together(self, works: Sequence[Callable[[], None]]) -> None:
        """Until all have ended. Raises what the first one raised that failed; the others go on to their end."""
        errors: list[BaseException] = []
        self._working, self._is_over = list(range(len(works))), False

        def run(number: int, work: Callable[[], None]) -> None:
            self._own.number = number
            try:
                self._await_turn(number)
                work()
            except BaseException as error:
                errors.append(error)
            finally:
                with self._changed:
                    self._working.remove(number)
                    self._changed.notify_all()

        threads = [
            threading.Thread(target=run, args=(number, work), name=f"micro-batch {number}", daemon=True)
            for number, work in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C: Python cannot end while they compute
            self._is_over = True
            for thread in threads:
                thread.join()
            raise
        if errors:
            raise errors[0]

    def give_way(self) -> None:
        """Let the others go on until they give way in their turn."""
        number = getattr(self._own, "number", None)
        if number is None:
            return
        with self._changed:
            self._working.append(self._working.pop(0))
            self._changed.notify_all()
        self._await_turn(number)
        if self._is_over:
            raise RuntimeError("the step was given up")

    def _await_turn(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._working[0] == number)


def run_layer(plan: LayerPlan, here: LayerContext, held: HeldBytes, turns: Turns, x: Tensor) -> Tensor:
    """The layer's result, with its backward to come."""
    run = _LayerRun(plan, here, held, turns)
    result: Tensor = _layer(run, x, *here.weights.parameters())
    return result


def _layer_forward(ctx: Any, run: "_LayerRun", x: Tensor, *parameters: nn.Parameter) -> Tensor:
    ctx.run, ctx.parameters = run, parameters
    return run.forward(x.detach())


def _layer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    run: _LayerRun = ctx.run
    grad_x = run.backward(grad)
    return None, grad_x, *(run.parameter_gradients.pop(each, None) for each in ctx.parameters)


_layer = differentiable(_layer_forward, _layer_backward)


class _LayerRun:
    """One forward of a layer, and the backward that belongs to it."""

    def __init__(self, plan: LayerPlan, here: LayerContext, held: HeldBytes, turns: Turns) -> None:
        self.parameter_gradients: dict[nn.Parameter, Tensor] = {}
        self._plan = plan
        self._here = here
        self._held = held
        self._turns = turns
        self._held_bytes = 0
        self._values: dict[str, Any] = {}
        self._gradients: dict[str, dict[str, Tensor]] = {}  # by name, and by the operator that read it
        self._constants: set[str] = set(plan.graph.facts)  # names without a gradient
        self._graphs: dict[str, OperatorGraph] = {}
        self._collectives: dict[str, Collective] = {}
        self._flights: dict[tuple[str, bool], Flight] = {}  # by name and whether it is of backward
        self._half_done: set[str] = set()  # products
        self._tiled: dict[str, TiledRun] = {}

    def forward(self, x: Tensor) -> Tensor:
        plan, self._values = self._plan, {self._plan.graph.begin: x}
        self._go_through(plan.schedule.forward, plan.freed_forward, backward=False)
        result: Tensor = self._values.pop(plan.graph.end)
        self._held_bytes = bytes_of(self._held_tensors())
        self._held.add(self._held_bytes)
        return result

    def backward(self, grad: Tensor) -> Tensor:
        """The gradient of the layer's input; those of parameters are in `parameter_gradients`."""
        plan, graph = self._plan, self._plan.graph
        self._gradients[graph.end] = {graph.maker_of[graph.end].name: grad}
        self._go_through(plan.schedule.backward, plan.freed_backward, backward=True)
        self._values.clear()
        self._tiled.clear()
        self._held.add(-self._held_bytes)
        result = self._gradient_of(graph.begin)
        assert result is not None
        return result

    def _go_through(self, actions: Sequence[Action], freed: Sequence[Sequence[str]], *, backward: bool) -> None:
        here, plan = self._here, self._plan
        for action, names in zip(actions, freed, strict=True):
            if action.verb in (WAIT, WAIT_AGAIN, WAIT_GRADIENT):
                self._turns.give_way()  # another micro-batch may go on while this one waits
            with here.spans.of(span_name(action), here.layer, backward=backward):
                self._do(plan.graph.operators[action.operator], action.verb)
            for name in names:
                if backward or name not in plan.kept:
                    self._values.pop(name, None)

    def _do(self, operator: Operator, verb: str) -> None:
        match operator, verb:
            case Tiled(), "start" | "wait":
                self._tile(operator, verb, frozenset(operator.makes))
            case Tiled(), "start again" | "wait again":
                self._tile(operator, verb.removesuffix(" again"), self._plan.made_again(operator))
            case Tiled(), _:
                self._tile_gradient(operator, verb)
            case RowExchange(), "start" | "wait" | "start again" | "wait again":
                self._exchange(operator, verb.removesuffix(" again"))
            case RowExchange(), _:
                self._exchange_gradient(operator, verb)
            case _, "":
                self._run(operator, recorded=not records_again(operator, self._plan.again))
            case _, "again":
                self._run(operator, recorded=records_again(operator, self._plan.again))
            case WeightProduct(), _:
                self._product_gradient(operator, verb)
            case Compute(), _:
                self._gradient(operator)

    def _run(self, operator: Operator, *, recorded: bool) -> None:
        values = [self._values[name] for name in operator.reads]
        if isinstance(operator, WeightProduct):
            with torch.no_grad():
                made: Any = operator.forward(self._here.weights, values)
        else:
            assert isinstance(operator, Compute)
            made = self._recorded(operator, values) if recorded else self._unrecorded(operator, values)
        self._here.weights.take()
        for name, value in by_name(operator, made).items():
            self._values[name] = value.detach() if isinstance(value, Tensor) else value

    def _recorded(self, operator: Compute, values: list[Any]) -> Any:
        graph = OperatorGraph(operator, self._values)
        made, constants = graph.record(self._here, values, self._constants)
        self._constants |= constants
        self._graphs[operator.name] = graph
        return made

    @torch.no_grad()
    def _unrecorded(self, operator: Compute, values: list[Any]) -> Any:
        return operator.function(self._here, *values)

    def _exchange(self, operator: RowExchange, verb: str) -> None:
        """Start, or wait and take the result."""
        first, made = operator.reads[0], operator.makes[0]
        if verb == START:
            x = self._values[first]
            collective = operator.collective(self._here, *(self._values[name] for name in operator.reads))
            self._collectives[operator.name] = collective
            if first in self._constants:
                self._constants.add(made)
            if collective.group.size == 1:
                self._values[made] = x
            else:
                self._launch(operator, x, backward=False)
        elif self._collectives[operator.name].group.size > 1:
            self._values[made] = self._land(operator)

    def _launch(self, operator: RowExchange, x: Tensor, *, backward: bool) -> None:
        flight = self._flights[operator.name, backward] = Flight(self._collectives[operator.name])
        with torch.no_grad():
            flight.launch(x.transpose(0, operator.dim), backward=backward, part=operator.part)

    def _land(self, operator: RowExchange, *, backward: bool = False) -> Tensor:
        with torch.no_grad():
            return self._flights.pop((operator.name, backward)).land().transpose(0, operator.dim)

    @torch.no_grad()
    def _tile(self, operator: Tiled, verb: str, wanted: frozenset[str]) -> None:
        step = operator.start if verb == START else operator.finish
        run = self._tiled.setdefault(operator.name, TiledRun(self._here, self._values))
        self._values.update(step(run, wanted))
        self._here.weights.take()

    def _gradient(self, operator: Compute) -> None:
        if operator.leads_to in self._collectives:  # what goes in tiles has a wire of its own
            group = self._collectives[operator.leads_to].group
            if group.launcher is not None and group.size > 1:
                group.launcher.combine_begins()  # it makes way for this exchange
        found = {name: self._gradient_of(name) for name in operator.makes}
        grads = {name: grad for name, grad in found.items() if grad is not None}
        of_read, of_parameters = self._graphs.pop(operator.name).gradients(grads)
        for name in operator.makes:
            self._gradients.pop(name, None)
        for name, grad in of_read.items():
            self._add(operator, name, grad)
        for parameter, grad in of_parameters:
            self._add_parameter(parameter, grad)

    def _product_gradient(self, operator: WeightProduct, verb: str) -> None:
        grad = self._gradient_of(operator.makes[0])
        if grad is None:
            return
        values = [self._values.get(name) for name in operator.reads]
        if verb == GRADIENT:
            with torch.no_grad():
                self._add(operator, operator.reads[0], operator.input_gradient(self._here.weights, values, grad))
            self._here.weights.take()
        else:
            self._weight_gradients(operator, values, grad)
        if operator.name in self._half_done:  # the other of the two steps is done
            del self._gradients[operator.makes[0]]
        self._half_done.add(operator.name)

    def _weight_gradients(self, operator: WeightProduct, values: list[Any], grad: Tensor) -> None:
        weights = self._here.weights
        with torch.no_grad():
            gradients = operator.weight_gradients(weights, values, grad)
        whole = weights.whole(operator.weight)
        weights.take()
        with torch.enable_grad():
            used = [weights[operator.weight] if whole is None else None, operator.bias(weights)]
        if whole is not None:
            self._add_parameter(whole, gradients[0].to(whole.dtype))
        given = zip(used, gradients, strict=True)
        pairs = [(tensor, each) for tensor, each in given if tensor is not None and each is not None]
        parameters, _ = weights.take()
        if not pairs:
            return
        found = torch.autograd.grad([tensor for tensor, _ in pairs], parameters, [each for _, each in pairs])
        for parameter, each in zip(parameters, found, strict=True):
            self._add_parameter(parameter, each)

    def _exchange_gradient(self, operator: RowExchange, verb: str) -> None:
        if verb == WAIT_GRADIENT:
            if (operator.name, True) in self._flights:
                self._add(operator, operator.reads[0], self._land(operator, backward=True))
            return
        grad = self._gradient_of(operator.makes[0])
        self._gradients.pop(operator.makes[0], None)
        if grad is not None and self._collectives[operator.name].group.size > 1:
            self._launch(operator, grad, backward=True)
        else:
            self._add(operator, operator.reads[0], grad)

    def _tile_gradient(self, operator: Tiled, verb: str) -> None:
        run, made = self._tiled[operator.name], operator.makes[-1]
        if verb == WEIGHTS:
            grad = self._gradient_of(made) if run.product_grad is None else run.product_grad
            assert grad is not None
            self._weight_gradients(operator.product, [self._values[name] for name in operator.product.saves], grad)
            return
        with torch.no_grad():
            if verb == WAIT_GRADIENT:
                for name, each in operator.finish_gradient(run).items():
                    self._add(operator, name, each)
            else:
                grad = self._gradient_of(made)
                assert grad is not None
                operator.start_gradient(run, grad)
                del self._gradients[made]
        self._here.weights.take()

    def _add(self, operator: Operator, name: str, grad: Tensor | None) -> None:
        if grad is not None and name not in self._constants:
            self._gradients.setdefault(name, {})[operator.name] = grad

    def _gradient_of(self, name: str) -> Tensor | None:
        """The sum of what its readers gave, in the order of operators: the same bits under every schedule."""
        parts = self._gradients.get(name)
        if not parts:
            return None
        total, *others = (parts[each] for each in self._plan.graph.operators if each in parts)
        for other in others:
            total = total + other
        self._gradients[name] = {next(iter(parts)): total}
        return total

    def _add_parameter(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        if grad is not None:
            known = self.parameter_gradients.get(parameter)
            self.parameter_gradients[parameter] = grad if known is None else known + grad

    def _held_tensors(self) -> Iterator[Tensor]:
        """What is kept until backward and belongs to this layer's micro-batch alone."""
        yield from (value for value in self._values.values() if isinstance(value, Tensor))
        for graph in self._graphs.values():
            yield from graph.own_tensors()
