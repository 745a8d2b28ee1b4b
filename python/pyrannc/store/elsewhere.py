"""Parameters and buffers that other ranks hold: shape and type can be read, contents cannot.

Every rank runs the same script. What it does to each parameter by itself, such as ``p.data.clamp_(-1, 1)`` or an
optimizer by hand, is done by the ranks that hold the parameter, and is nothing here; what would need contents raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, wraps
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from pyrannc.capture.reads.lacking import Lacking
from pyrannc.capture.torch_internals.patching import CHECKS_OF_SENT, GROUP_METHODS, PatchPoint
from pyrannc.capture.torch_internals.tensors import DisableTorchFunctionSubclass, pytree, refuse_reading
from pyrannc.errors import RaNNCError
from pyrannc.job import process
from pyrannc.store.held_by_some import held_by_some
from pyrannc.store.unscale import UNSCALE, changes_of, forget_overflow, is_told, unscale_own


@dataclass(frozen=True)
class Home:
    """What is known here of a tensor that other ranks hold.

    Attributes:
        kind: ``"parameter"``, ``"buffer"``, or what was made of one.
        name: first name in the model.
        ranks: that hold it.
        device: this rank's.
        strides: as on these ranks.
        plain: the class of the tensor there.
        spread: each of these ranks has a part of it.
        param: ``id`` of the parameter or buffer that it is, or was made of.
        covers: "all" or "some": who changes it changes so many elements of a parameter's gradient; "": none.
    """

    kind: str
    name: str
    ranks: tuple[int, ...]
    device: torch.device
    strides: tuple[int, ...]
    plain: type[Tensor] = Tensor
    spread: bool = False
    param: int = 0
    covers: str = ""

    def __str__(self) -> str:
        if self.spread:
            return f'{self.kind} "{self.name}" is divided among ranks {_list(self.ranks)}'
        where = "rank " + " and ".join(map(str, self.ranks)) if len(self.ranks) < 3 else f"ranks {_list(self.ranks)}"
        own = process.get_rank()
        return f'{self.kind} "{self.name}" is on {where}, not on {"others" if own in self.ranks else f"rank {own}"}'

    def refuse(self, asked: str) -> NoReturn:
        """Raises what a script gets that reads contents."""
        raise RaNNCError(self.why_not(asked))

    def why_not(self, asked: str) -> str:
        """Why contents cannot be read, and what to do instead."""
        return f"{self}, so {asked} cannot read it here. {self._instead}"

    def refuse_differentiating(self) -> NoReturn:
        """Raises what a script gets that asks ``torch.autograd.grad`` for the gradient."""
        raise RaNNCError(
            f"{self}, so autograd.grad() cannot give its gradient here. Call loss.backward(), behind which "
            "model.get_param_grad(name), which all ranks call, gives the whole one; with a plan of one Stage "
            "(RANNC_PARTITION_NUM=1) every rank has all parameters"
        )

    def refuse_sending(self, call: str) -> NoReturn:
        """Raises what a script gets that sends contents to other ranks, or takes them from these, by such a call."""
        if self.is_of_gradient:
            why, whole = "backward() has summed gradients over ranks", "model.get_param_grad(name)"
        elif self.is_of_state:
            why, whole = "RaNNC keeps ranks equal", "optimizer.state_dict(from_global=True)"
        else:
            why, whole = "RaNNC keeps ranks equal", "model.state_dict()"
        raise RaNNCError(
            f"{self}, so {call} can neither send nor receive it here. {why}: leave {call} out. {whole}, "
            "which all ranks call, gives what is whole"
        )

    def refuse_call(self, name: str, *, writes: bool) -> NoReturn:
        """Raises what a script gets for a function of torch that would need contents.

        Args:
            name: as :func:`function_name` tells it.
            writes: to nothing else but this tensor.
        """
        asked = _initialiser() or _title(name)
        if self.is_of_state and writes:
            raise RaNNCError(f"{self}, so {asked} cannot write it here. {self._instead}")
        if self.is_of_gradient or not (writes or asked.startswith("nn.init.")):
            self.refuse(asked)
        kept = "; RANNC_ENABLE_ZERO=2 keeps parameters whole" if self.spread else ""
        raise RaNNCError(
            f"{self}, so {asked} cannot write it here. Use model.load_state_dict(state), which all ranks call, with a "
            f"state that has the new contents, or write them before the model is called first{kept}"
        )

    @property
    def is_of_gradient(self) -> bool:
        """True for a gradient, or what was made of one."""
        return "gradient" in self.kind

    @property
    def is_of_state(self) -> bool:
        """True for the optimizer's state of a parameter."""
        return self.kind.startswith("the optimizer's state")

    @property
    def _instead(self) -> str:
        if self.is_of_state:
            return (
                "optimizer.state_dict(from_global=True), which all ranks call, gives rank 0 the whole, and "
                "optimizer.load_state_dict(state, from_global=True) takes it back; RANNC_ENABLE_ZERO=off keeps it whole"
            )
        if self.is_of_gradient:
            calls = "model.get_param_grad(name) or model.clip_grad_norm(max_norm), which all ranks call"
        else:
            calls = (
                "model.state_dict() or model.get_param(name), which all ranks call, or compute in the model's forward"
            )
        if self.spread:
            kept, level = ("gradients", 1) if self.is_of_gradient else ("parameters", 2)
            return f"Use {calls}; RANNC_ENABLE_ZERO={level} keeps {kept} whole"
        what = "buffers" if self.kind.endswith("buffer") else "parameters"
        return f"Use {calls}; model.named_{what}(from_global=False) lists what is on this rank"


class Guarded(Lacking):
    """What both classes of tensors share."""

    _home: Home

    @property
    def home(self) -> Home:
        """Where its contents are."""
        return self._home

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _answer(func, args, dict(kwargs or {}))

    def stand_in(self) -> Tensor:
        """A meta tensor of the same form."""
        assert isinstance(self, Tensor)
        with DisableTorchFunctionSubclass():
            made = torch.empty_strided(self.shape, self._home.strides, dtype=self.dtype, device="meta")
            return nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        with DisableTorchFunctionSubclass():
            assert isinstance(self, Tensor)
            return f"<{self._home}: {self.dtype} {tuple(self.shape)}>"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec) if not spec else self._home.refuse("a format")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._home.refuse("pickling, as of torch.save() or copy.deepcopy(),")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self._home.refuse("copy.deepcopy()")


class ElsewhereParameter(Guarded, nn.Parameter):  # type: ignore[misc]  # its text is another
    """A parameter of other ranks."""


class ElsewhereTensor(Guarded, Tensor):  # type: ignore[misc]  # likewise
    """A buffer of other ranks, or what was computed of what other ranks hold."""


Made = TypeVar("Made", bound=ElsewhereTensor)


def send_away(tensor: Tensor, kind: str, name: str, ranks: tuple[int, ...], device: torch.device) -> None:
    """Frees a parameter or buffer that other ranks hold, and guards it; the object stays the same."""
    if isinstance(tensor, Guarded):
        return
    home = Home(kind, name, ranks, device, tensor.stride(), type(tensor), param=id(tensor))
    guard(tensor, home, ElsewhereParameter if isinstance(tensor, nn.Parameter) else ElsewhereTensor)


def guard(tensor: Tensor, home: Home, kind: type[ElsewhereParameter] | type[ElsewhereTensor]) -> None:
    """Frees a tensor, and guards it; the object stays the same."""
    _watch_sending()
    tensor.grad = None
    tensor.data = _blank(home, tensor.shape, tensor.dtype, process.get_rank())
    tensor._home = home  # type: ignore[attr-defined]  # of the class it gets
    tensor.__class__ = kind


@lru_cache(maxsize=1 << 16)
def _blank(home: Home, shape: torch.Size, dtype: torch.dtype, rank: int) -> ElsewhereTensor:
    """What has no memory, kept for the next step. Code that goes round the guard, as scripted functions do, is told so.

    Args:
        rank: this one, which stands in what is told.
    """
    with torch.inference_mode(False):
        made: Any = torch.empty_strided(shape, [0] * len(shape), dtype=dtype, device=home.device)
    refuse_reading(made, home.why_not("this code"))
    made._home = home
    made.__class__ = ElsewhereTensor
    return made  # type: ignore[no-any-return]  # of the class it got


def keep_with(tensor: Tensor, store: object) -> None:
    """Keeps what can bring it back for as long as the script has the tensor, if that is guarded."""
    if is_elsewhere(tensor):
        vars(tensor)["_store"] = store


def bring_here(tensor: Tensor, contents: Tensor) -> None:
    """Takes the guard off, and gives the parameter or buffer contents."""
    if is_elsewhere(tensor):
        for name in ("_gradient", "_store", "piece", "start"):
            vars(tensor).pop(name, None)
        home: Home = vars(tensor).pop("_home")
        tensor.__class__ = home.plain
    tensor.data = contents


def is_elsewhere(tensor: Tensor) -> bool:
    """True for a parameter or buffer that other ranks hold."""
    return isinstance(tensor, Guarded)


def ids_of_params(tensors: Iterable[object]) -> set[int]:
    """``id`` of the parameters or buffers that those of other ranks are, or were made of."""
    return {tensor.home.param for tensor in tensors if isinstance(tensor, Guarded)}


# What scripts may do.


def named(names: str) -> frozenset[str]:
    """Names of functions, as :func:`function_name` tells them."""
    return frozenset(names.split())


_OF_SHAPE = named(
    "shape.get size numel nelement dim ndim.get ndimension stride dtype.get layout.get is_floating_point is_complex "
    "is_signed is_contiguous element_size itemsize.get nbytes.get is_sparse.get is_sparse_csr.get is_quantized.get "
    "is_nested.get is_mkldnn.get is_conj is_neg is_same_size __len__ storage_offset"
)
_OF_DEVICE = {
    "device.get": lambda device: device,
    "is_cuda.get": lambda device: device.type == "cuda",
    "is_cpu.get": lambda device: device.type == "cpu",
    "is_xpu.get": lambda device: device.type == "xpu",
    "is_mps.get": lambda device: device.type == "mps",
    "is_meta.get": lambda device: False,
    "get_device": lambda device: -1 if device.index is None else device.index,
}
OF_AUTOGRAD = named(
    "requires_grad.get requires_grad.set requires_grad_ is_leaf.get grad_fn.get _version.get is_inference "
    "retains_grad.get register_hook register_post_accumulate_grad_hook detach_ __hash__ "
    "_backward_hooks.get _post_accumulate_grad_hooks.get"
)
METADATA = _OF_SHAPE | _OF_DEVICE.keys() | {"requires_grad.get", "is_leaf.get", "_version.get", "__hash__"}
"""What only reads form and place of a tensor, by :func:`function_name`."""

_IN_PLACE = named(
    "zero_ fill_ copy_ add_ sub_ subtract_ mul_ multiply_ div_ divide_ true_divide_ pow_ sqrt_ rsqrt_ square_ neg_ "
    "abs_ sign_ exp_ log_ clamp_ clamp_min_ clamp_max_ clip_ lerp_ addcmul_ addcdiv_ masked_fill_ nan_to_num_ "
    "__iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ipow__ __setitem__ "
    "_foreach_zero_ _foreach_add_ _foreach_sub_ _foreach_mul_ _foreach_div_ _foreach_clamp_min_ "
    "_foreach_clamp_max_ _foreach_lerp_ _foreach_addcmul_ _foreach_addcdiv_ _foreach_copy_"
)
_EACH_BY_ITSELF = named(
    "add sub subtract rsub mul multiply div divide true_divide pow sqrt rsqrt square neg negative abs sign exp log "
    "clamp clamp_min clamp_max clip lerp addcmul addcdiv maximum minimum where masked_fill nan_to_num reciprocal "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __div__ __rdiv__ __truediv__ __rtruediv__ __pow__ __rpow__ "
    "__neg__ __abs__ __gt__ __lt__ __ge__ __le__ gt lt ge le zeros_like ones_like empty_like full_like view reshape "
    "flatten t transpose permute unsqueeze squeeze expand narrow __getitem__ T.get mT.get data.get "
    "_foreach_add _foreach_sub _foreach_mul _foreach_div _foreach_sqrt"
)
_SHOW_ALL = named("data.get view t transpose permute unsqueeze squeeze T.get mT.get")
_SHOW_ALL_WITHOUT_GAPS = named("reshape flatten")
_SHOW_SOME = named("narrow __getitem__")
_LIKE_ANOTHER = frozenset(("view_as", "reshape_as", "expand_as"))
_COPIES_OF_GRADIENT = named("clone detach contiguous")
_DISTRIBUTED = CHECKS_OF_SENT[0].owner.__name__
_OF_SENDING = (_DISTRIBUTED, "torch.distributed.c10d_logger")
"""Python modules between a script's call and the checks."""
_OWN = "pyrannc."
DRAWN = named("rand_like randn_like randint_like")
"""What draws a whole tensor of a form, on all ranks alike, so that their generators stay in step."""


def _answer(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a function of torch gives that was called with a tensor of other ranks."""
    name = function_name(func)
    if name.startswith("grad."):
        if name == "grad.get":
            return _gradient(args[0])
        note_dropped(args)
        return None
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    guarded: list[Any] = [tensor for tensor in tensors if isinstance(tensor, Guarded)]
    first: Guarded = guarded[0]
    home = first._home
    if is_sending(func):
        home.refuse_sending(f"dist.{name}()")
    if name == UNSCALE:
        own = [grad for grad in args[0] if not isinstance(grad, Guarded)]
        note_replaced(args[0])
        return unscale_own(func, own, ids_of_params(args[0]), *args[1:])
    if not isinstance(tensors[0], Guarded):
        if name in _LIKE_ANOTHER:
            return func(args[0], first.stand_in())
        if func is torch.autograd.grad:
            home.refuse_differentiating()
        home.refuse(_title(name))
    if stays_itself(name, first, args, kwargs):
        return first
    if name in OF_AUTOGRAD:
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name in _OF_DEVICE:
        return _OF_DEVICE[name](home.device)
    if name in _OF_SHAPE:
        return func(first.stand_in(), *args[1:], **kwargs)
    if name in DRAWN:
        return _drawn(func, first, args, kwargs)
    if name == "data.set":
        note_changed(func, name, args, kwargs)
        return None
    if name in _IN_PLACE and args and all(isinstance(item, Guarded) for item in pytree.tree_leaves(args[0])):
        note_changed(func, name, args, kwargs)
        return _changed(first, args[0])
    in_place = in_place_of(name, args, kwargs)
    if in_place is not None:
        return _answer(in_place, args, without_out(kwargs))
    by_itself = name in _EACH_BY_ITSELF or (name in _COPIES_OF_GRADIENT and home.is_of_gradient)
    if by_itself and "device" not in kwargs and len(guarded) == len(tensors):
        if kwargs.get("out") is not None:
            return _put_out(func, name, args, kwargs)
        return _computed(func, args, kwargs, replace(home, covers=_covered(name, first)))
    home.refuse_call(name, writes=is_write(name) and len(guarded) == 1)


def note_dropped(args: Sequence[Any]) -> None:
    """What a script assigns to a parameter's gradient may be nothing, or another than stands for it."""
    param = args[0]
    if len(args) == 1 or args[1] is None:
        forget_overflow([param.home.param])
        return
    with DisableTorchFunctionSubclass():
        stays = args[1] is vars(param).get("_gradient", param.grad)
    if not stays:
        _note_replaced(param, param.home.param)


def note_replaced(grads: Iterable[object]) -> None:
    """Takes note of what a script has computed of gradients, where it stands in their place."""
    for grad in grads:
        if isinstance(grad, ElsewhereTensor) and grad.home.covers != "all":
            _note_replaced(grad, grad.home.param)


def _note_replaced(like: Any, param: int) -> None:
    with DisableTorchFunctionSubclass():
        found = changes_of(param, like.dtype)
    for changes in found:
        changes.add_to_some("grad = ...")


def note_changed(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Takes note of what is done to gradients in place: it may make them finite, or otherwise."""
    is_list = isinstance(args[0], (list, tuple))
    for place, target in enumerate(args[0] if is_list else args[:1]):
        if not isinstance(target, ElsewhereTensor) or not target.home.covers:
            continue
        with DisableTorchFunctionSubclass():
            found = changes_of(target.home.param, target.dtype)
        for changes in found:
            if any(_is_gradient(leaf) for arg in args[1:] for leaf in pytree.tree_leaves(at(place, arg))):
                changes.joined = name
            if target.home.covers == "all":
                changes.add(func, name, [at(place, arg) for arg in args[1:]] if is_list else args[1:], kwargs)
            else:
                changes.add_to_some(name)


def in_place_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """What does in place what ``out=`` of the first argument does; None for other calls."""
    out = kwargs.get("out")
    return getattr(Tensor, f"{name}_", None) if args and isinstance(out, Guarded) and out is args[0] else None


def without_out(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, but for ``out``."""
    return {key: value for key, value in kwargs.items() if key != "out"}


def _put_out(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Takes note of results that replace all contents of ``out``."""
    out = kwargs["out"]
    note_changed(func, name, (out, *args), without_out(kwargs))
    return _changed(out, out)


def _is_gradient(item: object) -> bool:
    """True for a gradient, or numbers made of one; not for a mask."""
    if not isinstance(item, ElsewhereTensor) or not item.home.is_of_gradient:
        return False
    with DisableTorchFunctionSubclass():
        return item.dtype != torch.bool


def at(place: int, arg: Any) -> Any:
    """Of an argument of a function that works on lists, what belongs to one target, as lists again."""
    return [arg[place]] if isinstance(arg, (list, tuple)) else arg


def _changed(first: Lacking, what: Any) -> Any:
    """Nothing is changed here; but what torch refuses of a parameter, it refuses here too."""
    plain = first.stand_in()
    if torch.is_grad_enabled() and plain.requires_grad:
        plain.mul_(1)
    return what


def _covered(name: str, source: Guarded) -> str:
    """How many elements of a gradient what a function makes of another tensor shares."""
    if name in _SHOW_ALL or name == "detach" or (name in _SHOW_ALL_WITHOUT_GAPS and source.stand_in().is_contiguous()):
        return source.home.covers
    return "some" if name in _SHOW_SOME and source.home.covers else ""


def stays_itself(name: str, source: Guarded, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True for what gives its argument back, as ``contiguous()`` of what is so."""
    if name == "detach_" and isinstance(source, ElsewhereTensor):
        return True
    return name == "contiguous" and source.stand_in().is_contiguous(*args[1:], **kwargs)


def _drawn(func: Any, like: Guarded, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A plain tensor, as all ranks have it."""
    device = kwargs.get("device")
    asked = {**kwargs, "device": like.home.device if device is None else device}
    asked.pop("input", None)
    return func(like.stand_in(), *args[1:], **asked)


def _computed(func: Any, args: Sequence[Any], kwargs: dict[str, Any], home: Home) -> Any:
    """Shapes and types of results, which are elsewhere too."""
    kind = home.kind if home.kind.startswith("what ") else f"what was computed of {home.kind}"

    def plain(item: Any) -> Any:
        return item.stand_in() if isinstance(item, Guarded) else item

    plain_args, plain_kwargs = pytree.tree_map(plain, (tuple(args), kwargs))
    with torch.no_grad():
        made = func(*plain_args, **plain_kwargs)
    return pytree.tree_map(lambda item: _value(item, replace(home, kind=kind)), made)


def _gradient(param: Any) -> Any:
    """What stands for a gradient, made once: scripts ask for it at every step."""
    own, home = vars(param), param._home
    with DisableTorchFunctionSubclass():
        # What was frozen after a backward keeps its gradient.
        if not param.requires_grad and not is_told(home.param):
            return None
    if "_gradient" not in own:
        own["_gradient"] = _value(param.stand_in(), replace(home, kind=f"the gradient of {home.kind}", covers="all"))
    return own["_gradient"]


def _value(made: Any, home: Home) -> Any:
    if not isinstance(made, Tensor):
        return made
    return made_elsewhere(made, home, ElsewhereTensor)


def made_elsewhere(like: Tensor, home: Home, kind: type[Made]) -> Made:
    """A guarded tensor of the form of another."""
    _watch_sending()
    found = _blank(home, like.shape, like.dtype, process.get_rank()).as_subclass(kind)
    found._home = replace(home, strides=like.stride())
    return found


def function_name(func: Any) -> str:
    """The function as torch calls it; ``shape.get`` is what reads the attribute ``shape``."""
    name: str = getattr(func, "__name__", str(func))
    access = {"__get__": "get", "__set__": "set", "__delete__": "delete"}.get(name)
    if access is None:
        return name
    of: Any = getattr(func.__self__, "fget", func.__self__)
    return f"{of.__name__}.{access}"


def is_sending(func: Any) -> bool:
    """True for a function of ``torch.distributed``."""
    return bool(getattr(func, "__module__", None) == _DISTRIBUTED)


@cache
def _watch_sending() -> None:
    """From now on, functions of ``torch.distributed`` and methods of groups refuse what not all ranks have, of which
    most ask nothing."""
    for point in CHECKS_OF_SENT:
        setattr(point.owner, point.name, _refusing_function(point))
    for point in GROUP_METHODS:
        setattr(point.owner, point.name, _refusing_method(point))


def _refusing_function(point: PatchPoint) -> Callable[..., None]:
    original = point.original

    def check(sent: Any, *args: Any) -> None:
        frame = caller = sys._getframe(1)
        while caller.f_globals.get("__name__", "") in _OF_SENDING and caller.f_back is not None:
            caller = caller.f_back
        if not caller.f_globals.get("__name__", "").startswith(_OWN):
            _refuse_sent(sent if isinstance(sent, (list, tuple)) else [sent], f"dist.{_sender(frame, caller)}()")
        original(sent, *args)

    return check


def _refusing_method(point: PatchPoint) -> Callable[..., Any]:
    original = point.original

    @wraps(original)
    def method(group: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller != _DISTRIBUTED and not caller.startswith(_OWN):
            _refuse_sent(pytree.tree_leaves((args, kwargs)), f"group.{point.name}()")
        return original(group, *args, **kwargs)

    return method


def _refuse_sent(sent: Iterable[object], call: str) -> None:
    for tensor in sent:
        if isinstance(tensor, Guarded):
            tensor.home.refuse_sending(call)
        held = held_by_some(tensor) if isinstance(tensor, Tensor) else None
        if isinstance(tensor, Tensor) and held is not None:
            kind = "the gradient of parameter" if held.is_gradient else "parameter or buffer"
            Home(kind, held.name, held.ranks, tensor.device, tensor.stride()).refuse_sending(call)


def _sender(frame: FrameType | None, caller: FrameType) -> str:
    """The function of ``torch.distributed`` that is called, from a frame inside of it."""
    found = ""
    while frame is not None and frame is not caller:
        if frame.f_globals.get("__name__", "") == _DISTRIBUTED:
            name = frame.f_code.co_name
            found = "P2POp" if name.startswith("__") else name
        frame = frame.f_back
    return found


def is_write(name: str) -> bool:
    """True for what changes its first argument in place, or assigns to it."""
    by_name = name.endswith("_") and not name.endswith("__") and not name.startswith(("_fused_", "share_", "resize_"))
    return by_name or name in _IN_PLACE or name == "data.set"


def _initialiser() -> str | None:
    """The function of ``torch.nn.init`` that runs, as a script calls it."""
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        if frame.f_globals.get("__name__") == nn.init.__name__ and not frame.f_code.co_name.startswith("_"):
            found = f"nn.init.{frame.f_code.co_name}()"
        frame = frame.f_back
    return found


def _title(name: str) -> str:
    if name.endswith(".set"):
        return f"an assignment to {name.removesuffix('.set')}"
    return name.removesuffix(".get") if "." in name else f"{name}()"


def _list(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
