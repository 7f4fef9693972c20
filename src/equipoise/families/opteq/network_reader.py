"""Convolutional and residual networks of torch, taken apart by following their `forward`."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn

from equipoise.core.validate import SettingError
from equipoise.families.opteq.affine_map import Affine, Convolve, Multiply
from equipoise.families.opteq.network_graph import Graph
from equipoise.families.opteq.network_tracing import (
    InPlaceTracer,
    SharedMemory,
    require_plain_calls,
)
from equipoise.families.opteq.pooling import adaptive_average_pool, average_pool, max_pool
from equipoise.prox.activation import Identity, ReLU, Sigmoid
from equipoise.prox.resolve import from_module

__all__ = ["read_graph"]

BATCH = object()
"""What `x.size(0)` is while a network is read."""

NORMALIZERS = (nn.BatchNorm1d, nn.BatchNorm2d)
OUTPUTS = (nn.Softmax, nn.LogSoftmax)


def read_graph(net: nn.Module, input_shape: Sequence[int], owner: str) -> Graph:
    """Take a network apart by following its `forward`.

    Args:
        net: The network, in evaluation mode.
        input_shape: The shape of a sample, such as (3, 32, 32).
        owner: Who asks, for messages.
    """
    like = next((own.detach() for own in net.parameters()), None)
    if like is None:
        raise SettingError(f"{owner}.net", "hold weights", net, got=type(net).__name__)
    require_plain_calls(net, owner, input_shape)
    try:
        traced = InPlaceTracer().trace(net)
    except Exception as error:  # whatever the network's own code raises, the sentence says it
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise SettingError(
            f"{owner}.net",
            "be a network that does the same whatever its input",
            net,
            "Following its forward failed: branches, loops and shapes must not depend on values.",
            got=f"{type(net).__name__} ({reason})",
        ) from error
    graph = Graph(tuple(input_shape), like)
    with torch.no_grad():
        _Reader(graph, dict(net.named_modules()), owner).read(traced)
    return graph


class _Reader:
    """Follows a traced network from node to node."""

    def __init__(self, graph: Graph, modules: dict[str, nn.Module], owner: str) -> None:
        self.graph = graph
        self.modules = modules
        self.owner = owner
        self.known: dict[fx.Node, Any] = {}
        self.memory = SharedMemory()

    def read(self, traced: fx.Graph) -> None:
        inputs = [node for node in traced.nodes if node.op == "placeholder"]
        if len(inputs) != 1:
            got = f"{len(inputs)} inputs"
            raise SettingError(f"{self.owner}.net", "have one input", None, got=got)
        for node in traced.nodes:
            if node.op == "placeholder":
                self.known[node] = self.graph.start()
            elif node.op == "output":
                result = self._value(node.args[0])
                if not isinstance(result, Affine):
                    got = type(result).__name__
                    raise SettingError(f"{self.owner}.net", "return one tensor", None, got=got)
                self.graph.output = result
            elif self.graph.last is not None:
                raise SettingError(self._place(node), "come before the softmax", None, got="it")
            else:
                made = self._apply(node)
                if self._is_in_place(node):
                    self._overwrite(node, made)
                self.known[node] = made
        if not self.graph.sources:  # a linear network: what it computes counts as a hidden layer
            assert self.graph.output is not None
            self.graph.output = self.graph.activate(Identity(), self.graph.output)

    def _value(self, arg: Any) -> Any:
        if isinstance(arg, tuple | list):
            return tuple(self._value(own) for own in arg)
        return self.known[arg] if isinstance(arg, fx.Node) else arg

    def _place(self, node: fx.Node) -> str:
        name = node.target if isinstance(node.target, str) else node.name
        return f"{self.owner}.net.{name}"

    def _apply(self, node: fx.Node) -> Any:
        place = self._place(node)
        args = self._value(node.args)
        options = {key: self._value(own) for key, own in node.kwargs.items()}
        try:
            if node.op == "call_module":
                return self._module(self.modules[str(node.target)], place, *args, **options)
            if node.op == "get_attr":
                raise _UnknownError("a tensor")
            name = node.target if node.op == "call_method" else _FUNCTION_NAMES.get(node.target)
            if name is None or not hasattr(self, f"_on_{name}"):
                raise _UnknownError(str(getattr(node.target, "__name__", node.target)))
            return getattr(self, f"_on_{name}")(place, *args, **options)
        except _UnknownError as error:
            self._refuse(place, str(error))
        except (
            TypeError,
            RuntimeError,
            IndexError,
        ) as error:  # arguments or shapes that do not fit
            reason = str(error).partition("\n")[0].rstrip(".")
            raise SettingError(
                place, "take what the network gives it", None, got=f"an error: {reason}"
            ) from error

    def _is_in_place(self, node: fx.Node) -> bool:
        """Whether a node writes its result over its first argument."""
        if node.op == "call_module":
            return bool(getattr(self.modules[str(node.target)], "inplace", False))
        return node.target is operator.iadd or bool(node.kwargs.get("inplace", False))

    def _overwrite(self, node: fx.Node, made: Affine) -> None:
        """Let all names of the value that a node writes over have the new one."""
        old = self._value(node.args[0])
        self.memory.join(old, made)
        for other, value in self.known.items():
            if value is old:
                self.known[other] = made
            elif self.memory.is_shared(old, value) and any(
                user is not node and user not in self.known for user in other.users
            ):
                raise SettingError(
                    self._place(node),
                    "leave alone what is used again in another shape",
                    None,
                    "Do it without inplace=True.",
                    got="a value that it overwrites",
                )

    def _refuse(self, place: str, got: str) -> None:
        raise SettingError(
            place,
            "be a convolution, linear layer, batch normalisation, pooling, flattening, sum or "
            "admissible activation",
            None,
            got=got,
        )

    # Modules

    def _module(self, module: Any, place: str, value: Affine) -> Affine:
        kind = type(module)
        if kind is nn.Identity:
            return value
        if isinstance(module, nn.modules.dropout._DropoutNd):
            self._require_evaluation(place, module, module.p > 0)
            return value
        if kind is nn.Flatten:
            return self._on_flatten(place, value, module.start_dim, module.end_dim)
        if kind is nn.Linear:
            self._require_finite(place, module)
            out = (*value.shape[:-1], module.out_features)
            made = Multiply(_copy(module.weight), value.shape, out)
            # Of an image it acts on the rows, and its bias belongs to their entries.
            bias = _copy(module.bias)
            return value.through(made, bias if bias is None or len(out) == 1 else bias.expand(out))
        if kind is nn.Conv2d:
            return self._convolve(place, module, value)
        if isinstance(module, NORMALIZERS):
            return self._normalize(place, module, value)
        if kind is nn.AvgPool2d:
            return self._on_avg_pool2d(
                place,
                value,
                module.kernel_size,
                module.stride,
                module.padding,
                ceil_mode=module.ceil_mode,
                count_include_pad=module.count_include_pad,
                divisor_override=module.divisor_override,
            )
        if kind is nn.MaxPool2d:
            return self._on_max_pool2d(
                place,
                value,
                module.kernel_size,
                module.stride,
                module.padding,
                module.dilation,
                ceil_mode=module.ceil_mode,
                return_indices=module.return_indices,
            )
        if kind is nn.AdaptiveAvgPool2d:
            return self._on_adaptive_avg_pool2d(place, value, module.output_size)
        if kind in OUTPUTS:
            return self._end(module, value)
        try:
            return self.graph.activate(from_module(module), value)
        except ValueError as error:
            if kind.__module__ == nn.ReLU.__module__ and "must get one of" not in str(error):
                raise SettingError(
                    place, "be an admissible activation", None, got=f"{kind.__name__}: {error}"
                ) from None
            raise _UnknownError(kind.__name__) from None

    def _convolve(self, place: str, module: Any, value: Affine) -> Affine:
        self._require_finite(place, module)
        if module.padding_mode != "zeros" and any(
            map(bool, module._reversed_padding_repeated_twice)
        ):
            raise SettingError(f"{place}.padding_mode", "be 'zeros'", module.padding_mode)
        padding = module.padding
        if isinstance(padding, str):
            left, right, top, bottom = module._reversed_padding_repeated_twice
            if left != right or top != bottom:
                rule = "be the same on both sides, as an odd kernel gives it"
                raise SettingError(f"{place}.padding", rule, padding)
            padding = (top, left)
        made = Convolve.make(
            _copy(module.weight),
            value.shape,
            stride=module.stride,
            padding=padding,
            dilation=module.dilation,
            groups=module.groups,
        )
        return value.through(made, _copy(module.bias))

    def _normalize(self, place: str, module: Any, value: Affine) -> Affine:
        statistics = module.running_mean is not None
        self._require_evaluation(place, module, statistics and module.training)
        if not statistics:
            remedy = "Train it with track_running_stats=True."
            raise SettingError(place, "keep running statistics", module, remedy, got=str(module))
        self._require_finite(place, module)
        factor = (module.running_var + module.eps).rsqrt()
        factor = factor * module.weight if module.affine else factor
        shift = -module.running_mean * factor
        return value.scale(factor, shift + module.bias if module.affine else shift)

    def _end(self, module: nn.Module, value: Affine) -> Affine:
        self.graph.last = type(module)(dim=module.dim)
        return value

    def _require_evaluation(self, place: str, module: nn.Module, matters: bool) -> None:
        if matters and module.training:
            raise SettingError(
                place,
                "be in evaluation mode, as it depends on the batch or on chance in training",
                module,
                "Call net.eval().",
                got=str(module),
            )

    def _require_finite(self, place: str, module: nn.Module) -> None:
        if not all(bool(own.isfinite().all()) for own in module.state_dict().values()):
            raise SettingError(place, "have finite weights", None, got="NaN or infinity")

    # Functions and methods

    def _on_add(self, place: str, first: Any, second: Any, *, alpha: float = 1) -> Affine:
        if not (isinstance(first, Affine) and isinstance(second, Affine) and alpha == 1):
            raise _UnknownError("a sum with a number")
        if first.shape != second.shape:
            got = f"shapes {first.shape} and {second.shape}"
            raise SettingError(place, "add values of one shape", None, got=got)
        return first + second

    def _on_flatten(
        self, place: str, value: Affine, start_dim: int = 0, end_dim: int = -1
    ) -> Affine:
        if start_dim != 1 or end_dim not in (-1, len(value.shape)):
            raise SettingError(place, "flatten each sample, from axis 1 on", start_dim)
        return self._flattened(value)

    def _on_view(self, place: str, value: Affine, *shape: Any) -> Affine:
        shape = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        size = math.prod(value.shape)
        if len(shape) != 2 or shape[1] not in (-1, size) or shape[0] not in (BATCH, -1):
            rule = "give each sample one row: x.flatten(1) or x.view(x.size(0), -1)"
            raise SettingError(place, rule, None, got="another shape")
        return self._flattened(value)

    def _flattened(self, value: Affine) -> Affine:
        made = value.flatten()
        self.memory.join(value, made)  # mostly a view
        return made

    _on_reshape = _on_view

    def _on_size(self, place: str, value: Affine, axis: int | None = None) -> Any:
        sizes = (BATCH, *value.shape)
        return sizes if axis is None else sizes[axis]

    def _on_getattr(self, place: str, value: Affine, name: str) -> Any:
        if name != "shape":
            raise _UnknownError(f"the attribute {name}")
        return self._on_size(place, value)

    def _on_getitem(self, place: str, value: Any, index: Any) -> Any:
        if isinstance(value, Affine):
            raise _UnknownError("a slice")
        return value[index]

    def _on_mean(self, place: str, value: Affine, dim: Any = None, keepdim: bool = False) -> Affine:
        axes = (
            {axis % 4 for axis in dim} if isinstance(dim, tuple) and len(value.shape) == 3 else ()
        )
        if axes != {2, 3}:
            raise _UnknownError("a mean over other axes than 2 and 3")
        pooled = self._on_adaptive_avg_pool2d(place, value, 1)
        return pooled if keepdim else pooled.flatten()

    def _on_relu(self, place: str, value: Affine, inplace: bool = False) -> Affine:
        return self.graph.activate(ReLU(), value)

    def _on_tanh(self, place: str, value: Affine) -> Affine:
        return self.graph.activate(from_module(nn.Tanh()), value)

    def _on_sigmoid(self, place: str, value: Affine) -> Affine:
        return self.graph.activate(Sigmoid(), value)

    def _on_softmax(
        self, place: str, value: Affine, dim: int, *, _stacklevel: int = 3, dtype: None = None
    ) -> Affine:
        return self._end_with(nn.Softmax(dim), value, dtype)

    def _on_log_softmax(
        self, place: str, value: Affine, dim: int, *, _stacklevel: int = 3, dtype: None = None
    ) -> Affine:
        return self._end_with(nn.LogSoftmax(dim), value, dtype)

    def _end_with(self, module: nn.Module, value: Affine, dtype: None) -> Affine:
        if dtype is not None:
            raise _UnknownError("a softmax with a dtype")
        return self._end(module, value)

    def _on_avg_pool2d(self, place: str, value: Affine, *args: Any, **options: Any) -> Affine:
        return average_pool(place, value, *args, **options)

    def _on_adaptive_avg_pool2d(self, place: str, value: Affine, output_size: Any) -> Affine:
        return adaptive_average_pool(place, value, output_size)

    def _on_max_pool2d(self, place: str, value: Affine, *args: Any, **options: Any) -> Affine:
        return max_pool(self.graph, place, value, *args, **options)


class _UnknownError(Exception):
    """What stands in a network where nothing known does."""


_FUNCTION_NAMES: dict[Any, str] = {
    operator.add: "add",
    operator.iadd: "add",
    torch.add: "add",
    operator.getitem: "getitem",
    getattr: "getattr",
    torch.flatten: "flatten",
    torch.reshape: "reshape",
    torch.mean: "mean",
    torch.relu: "relu",
    F.relu: "relu",
    torch.tanh: "tanh",
    F.tanh: "tanh",
    torch.sigmoid: "sigmoid",
    F.sigmoid: "sigmoid",
    F.softmax: "softmax",
    F.log_softmax: "log_softmax",
    torch.softmax: "softmax",
    torch.log_softmax: "log_softmax",
    F.avg_pool2d: "avg_pool2d",
    F.max_pool2d: "max_pool2d",
    F.adaptive_avg_pool2d: "adaptive_avg_pool2d",
}


def _copy(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().clone()
