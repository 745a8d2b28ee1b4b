"""``RaNNCModule``: the user's model, trained by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pyrannc import config as configuration
from pyrannc.call.agreed import AgreedCall
from pyrannc.call.batch_arguments import BatchNames
from pyrannc.call.lengths import Lengths, Wanted
from pyrannc.call.row_lists import RowLists
from pyrannc.call.shared_inputs import refuse_shared
from pyrannc.call.stale import StaleAttributes
from pyrannc.call.telling import (
    no_gradients_of,
    no_plan_for_both,
    tell_of_groups,
    tell_of_mixing,
    tell_of_normalising,
    tell_of_unseen,
    tell_of_whole_parts,
)
from pyrannc.call.unwrap import unwrapped
from pyrannc.call.variant import RowMixing, Variant
from pyrannc.call.variants import MOST_VALUES, Variants
from pyrannc.capture import Captured, CaptureOptions, Sample, flatten
from pyrannc.capture.nodes.autocast import no_autocast
from pyrannc.capture.nodes.progress import progress_told
from pyrannc.capture.nodes.row_conditions import first_other, other_rows
from pyrannc.capture.torch_internals.compiler import start_compiling_processes
from pyrannc.capture.torch_internals.gradients import at_end_of_backward, kept_uncompiled
from pyrannc.capture.torch_internals.levels import transforms_are_active
from pyrannc.core.program import Call, RankProgram
from pyrannc.errors import CaptureError, ConfigError, PeerError, PlanError, RaNNCError, first_line
from pyrannc.face.deployed import DeployedModel
from pyrannc.face.state import refuse_unavailable
from pyrannc.job import agree, phases, process
from pyrannc.job.device_memory import keep_below
from pyrannc.job.device_order import follow_the_last
from pyrannc.job.faults import collective
from pyrannc.job.garbage import older_objects_left_alone
from pyrannc.job.progress import Lines
from pyrannc.log import get_logger
from pyrannc.planning.measured import has_compiled
from pyrannc.proof import compare_once, prove
from pyrannc.runtime.context import StageContext
from pyrannc.runtime.deployment import Deployment
from pyrannc.runtime.givers import Leaves
from pyrannc.runtime.step import Step, StepOptions
from pyrannc.store.after_backward import CallOfBackward, finish_backward, note_share, watch_beside
from pyrannc.store.before_first_call import note_called, watch_until_called
from pyrannc.store.optimizer import UserOptimizer
from pyrannc.store.shared_params import refuse_deployed, take_back_dropped
from pyrannc.switches import switches

_log = get_logger("RaNNCModule")
_TOLD_CAPTURES = 2
"""One for training and one for evaluation are what scripts have."""


class RaNNCModule(DeployedModel):
    """A model that runs on all ranks.

    The first call captures the model, finds a Plan and deploys it; every call is made by all ranks, each with its
    own batch. See the README for a loop.

    Args:
        model: any module; its class is not changed.
        optimizer: after deployment it lists only this rank's parameters.
        gather_inputs: True: the global batch is the rows of all ranks' batches. False: only rank 0's inputs count,
            and every rank gets the whole output.
        load_deployment: path of a plan file to use instead of searching.
        enable_apex_amp: gone; raises.
        allreduce_amp_master_params: gone; raises.
        enable_zero: what Replicas divide among them (ZeRO) is the search's choice, unless the configuration's
            ``enable_zero`` says how much.
        check_unused_values: warn about parameters that the model does not use.
        offload_params: not available yet; raises.
        row_mixing: where the model lets rows of the batch meet other than in a sum or a mean, what they are:
            ``"batch"``: all rows of the global batch, as in one process; this part of the model, and what follows
            it, is computed on all rows by every rank. ``"microbatch"``: the rows of a microbatch on one Replica.
        batch_arguments: names or positions of the arguments whose tensors have the rows of the batch as dimension 0,
            all others having none. By default the first tensor has them, and others of that extent, if they must; of
            one that need not an error asks. Those of a larger extent are packed: they have as many elements for each
            row, as the patches of all images.
        leaf_modules: names of sub-modules that are kept whole, as ``model.named_modules()`` has them: what cannot be
            captured inside of them runs as it is: on all rows, unless trials with parts of a batch show that it
            treats each row by itself. Where the capture fails, the smallest sub-module that holds the failure is kept
            whole by itself.
        row_wise_modules: likewise, of sub-modules that treat each row by itself, as you know, though rows may meet
            inside, as where experts sort tokens: nothing is tried. Their operators are captured where all of them can
            be, else each runs whole on the rows in hand. ``*`` stands for anything: ``"layers.*.experts"``.
        allow_uncut: where nothing smaller helps, the whole model is kept whole: one Stage, on all rows unless trials
            show as much.
        outputs: what a call in training mode is to return, as keys or attributes of the model's result
            (``["loss"]``), or as positions (``[0]``) where it is a tuple or a list, or takes positions as results of
            transformers do. The rest is neither kept nor sent to the ranks whose rows they are, nor computed where
            nothing else needs it; what stands for it raises when it is used. In evaluation mode everything comes back.

    Attributes:
        ready: True once a Plan is deployed.
        model: the wrapped model.
        optimizer: the optimizer, or None.
        device: where this rank computes, and where its inputs must be.
        name_to_param: all parameters of the model by first name.
        used_param_ids: ``id`` of each parameter that some Stage uses; empty before the first call.

    Raises:
        RaNNCError: an argument that is gone or not available yet, or a model that another wrapper distributes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        gather_inputs: bool = True,
        load_deployment: str | Path | None = None,
        enable_apex_amp: bool = False,
        allreduce_amp_master_params: bool = False,
        enable_zero: bool = False,
        check_unused_values: bool = True,
        offload_params: bool = False,
        row_mixing: RowMixing = "batch",
        batch_arguments: BatchNames | None = None,
        leaf_modules: Sequence[str] = (),
        allow_uncut: bool = False,
        row_wise_modules: Sequence[str] = (),
        outputs: Sequence[str | int] | None = None,
    ) -> None:
        options = {
            "gather_inputs": gather_inputs,
            "load_deployment": load_deployment,
            "enable_zero": enable_zero,
            "check_unused_values": check_unused_values,
            "row_mixing": row_mixing,
            "batch_arguments": batch_arguments,
            "leaf_modules": leaf_modules,
            "allow_uncut": allow_uncut,
            "row_wise_modules": row_wise_modules,
            "outputs": outputs,
        }
        if isinstance(model, RaNNCModule):
            raise RaNNCError("the model is a RaNNCModule already: wrap the module that it shows, once (model.model)")
        super().__init__(unwrapped(model), options)
        if row_mixing not in get_args(RowMixing):
            raise RaNNCError(f'row_mixing is "batch" or "microbatch", not {row_mixing!r}')
        refuse_unavailable(enable_apex_amp or allreduce_amp_master_params, offload_params)
        self.optimizer = optimizer
        self.device = process.own_device()
        self.name_to_param = dict(self.model.named_parameters())
        self.used_param_ids: set[int] = set()
        self._gather_inputs = gather_inputs
        self._row_mixing = row_mixing
        self._batch_arguments = batch_arguments
        self._capture_options = CaptureOptions(
            tuple(leaf_modules), tuple(row_wise_modules), allow_uncut, _asked(outputs)
        )
        self._check_unused = check_unused_values
        try:
            self._config = _load_config()
        except ConfigError as error:
            # What reads the files says nothing to the script's author.
            raise error.with_traceback(None) from None
        if enable_zero and self._config.enable_zero == "off":
            self._config = replace(self._config, enable_zero="auto")
        self._plan_file = Path(load_deployment) if load_deployment is not None else _configured_plan_file(self._config)
        self._user_optimizer = UserOptimizer.of(optimizer) if optimizer is not None else None
        self._variants = Variants()
        self._lengths = Lengths(self._variants)
        self._stale = StaleAttributes()
        self._row_lists = RowLists()
        self._agreement = self._new_agreement()
        self._proven = False
        self._made = True
        watch_until_called(self)

    # The call

    @kept_uncompiled
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model on the global batch; all ranks call it.

        Returns:
            What the model returns: batch-shaped outputs for this rank's own rows (all rows without
            ``gather_inputs``), outputs without rows averaged over the global batch.

        Raises:
            InputError: a tensor is on the wrong device, or the arguments have no batch.
            CaptureError: the model cannot be captured.
            PlanError: there is no Plan.
            MismatchError: the ranks disagree.
            PeerError: another rank has died, failed or left meanwhile.
        """
        if transforms_are_active():
            raise RaNNCError(
                "the model was called inside of a transform of torch.func (grad, vjp, jvp, vmap and the like) or of "
                "forward-mode differentiation, which RaNNC cannot follow: call it outside, and differentiate with "
                "loss.backward() or torch.autograd.grad()"
            )
        with collective("model(...)", new_round=True):
            if not torch.is_inference_mode_enabled():
                captured, made = self._run(args, kwargs)
            else:
                # What lives on after the call, such as leaves and buffers, must be ordinary tensors.
                with torch.inference_mode(False), torch.no_grad():
                    captured, made = self._run(*_ordinary((args, kwargs)))
            return captured.hand_back(made, (args, kwargs))

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Captured, list[Tensor]]:
        """The call's captured form, and the tensors that it gives."""
        self.device = process.ensure_process_group().device
        follow_the_last(self.device)
        with nullcontext() if self._deployment is not None else older_objects_left_alone(self.device):
            return self._run_agreed(args, kwargs)

    def _run_agreed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Captured, list[Tensor]]:
        args, kwargs = self._row_lists.packed(args, kwargs, self.device)
        call = self._agreement.agree(args, kwargs, self.device)
        if call is None:
            self._follow_trainable()
            call = self._agreement.agree(args, kwargs, self.device)
            assert call is not None, "requires_grad has just been agreed on"
        variant = call.variant
        if variant is None:
            variant, call = self._prepared(args, kwargs, call)
        else:
            self._set_limits(variant)
        self._variants.use(variant)
        self._stale.mark(variant)
        deployment = self._deployed("forward")
        program = variant.program(
            deployment.plan, deployment.buckets, call.batch.per_rank, self._gather_inputs, _call(variant)
        )
        if variant.of_tail and program.call != "forward":
            raise PlanError(no_gradients_of(variant.of_tail))
        deployment.sync_buffers(variant, program)
        if self._config.verify_partitioning and not self._proven and program.call != "forward":
            self._prove(deployment, variant, program, call)
        options = StepOptions(
            reduce=not switches().delay_grad_allreduce, keep_graph=switches().keep_graph, leaves=self._leaves(call)
        )
        note_share(deployment.store, call.batch.own_share)
        watch_beside()
        before = self._before_backward(deployment, variant, call)
        with no_autocast():
            context = deployment.prepare(variant, program)
            step = Step(
                context, program, call.tensors, call.drawn, variant, options, call.batch, before, deployment.recordings
            )
            deployment.share_buffers(variant)
        return variant.whole.captured, step.results()

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: AgreedCall) -> tuple[Variant, AgreedCall]:
        """A call without a captured form gets one, and the first call a Plan. All ranks call it."""
        if self._deployment is None:
            note_called(self)
            take_back_dropped(self.model)
            refuse_deployed(self.model, self._user_optimizer)
        keep_below(self._config.mem_limit_bytes, self.device)
        process.begin_connecting()
        if self.device.type == "cuda" and self._config.compiles_on("cuda") and not has_compiled(self._config):
            start_compiling_processes()
        variant = self._captured(args, kwargs, call)
        if not self._follow(variant):
            with no_autocast():
                self._deploy(variant, call)
            call = replace(call, key=(call.key[0], self._agreement.flags))
        if call.doubt is not None and call.doubt.is_open:
            call.doubt.take_for_granted()
        if process.get_rank() == 0:
            tell_of_normalising(variant, self._deployed("forward").plan)
        for dropped in self._variants.add(call.key, variant):
            self._deployed("forward").forget(dropped)
        return variant, replace(call, drawn=agree.broadcast_object(self._agreement.draw(variant)))

    def _leaves(self, call: AgreedCall) -> Leaves:
        """What the call's tensors may have been computed from, if they require gradients."""
        if not any(tensor.requires_grad for tensor in call.tensors):
            return Leaves()
        store = self._deployed("forward").store
        averaged = [param for optimizer in UserOptimizer.deployed() for param in optimizer.everywhere()]
        return Leaves(frozenset(map(id, averaged)), frozenset(map(id, store.used.values())))

    def _set_limits(self, variant: Variant) -> None:
        """Sets what the forward sets to parameters in place."""
        limits = variant.whole.captured.limits
        params = dict(self.model.named_parameters()) if limits else {}
        for limit in limits:
            limit.set(params)

    def _compare(self, variant: Variant, call: AgreedCall) -> None:
        """Holds a captured call against the model itself, on a few rows; without training if it has no own trace.

        Meanwhile other ranks look whether all tensors have rows that are taken to have them.
        """
        doubt = call.doubt if self._may_cut else None
        captured = variant.whole.captured
        if variant.has_own_trace and not captured.alone and not (torch.is_grad_enabled() and variant.trains):
            if doubt is not None:
                self._settle(doubt, call)
            return
        with phases.phase("RaNNCModule", "comparison", "the comparison of the captured graph", busy=True):

            def meanwhile(share: int, shares: int) -> None:
                if doubt is not None:
                    with self._stale.lifted():
                        doubt.look(share, shares, is_plain=variant.whole.captured.is_plain)

            found = compare_once(self.model, variant, call.tensors, call.batch, self.device, meanwhile)
            if doubt is not None:
                doubt.settle()
            if isinstance(found, CaptureError):
                raise found
            other = first_other(captured.row_conditions, 1) if captured.alone and found.why_not else None
            if other is not None:
                raise other_rows(other, 1)
            phases.note(str(found))
        self._compared = self._compared or str(found)

    def _prove(self, deployment: Deployment, variant: Variant, program: RankProgram, call: AgreedCall) -> None:
        """Compares the call with one process, once."""
        if not self._gather_inputs:
            raise RaNNCError("verify_partitioning needs gather_inputs=True: each rank with rows of its own")
        options = StepOptions(reduce=True, keep_graph=False)

        def begin(context: StageContext) -> Step:
            return Step(context, program, call.tensors, call.drawn, variant, options, call.batch)

        self._proven = True
        with phases.phase("RaNNCModule", "proof", "the proof"):
            prove(self.model, deployment, variant, program, call.tensors, call.batch.per_rank, call.drawn, begin)

    def _before_backward(
        self, deployment: Deployment, variant: Variant, call: AgreedCall
    ) -> Callable[[Sequence[Tensor | None]], None]:
        """What a backward begins with, given the gradients of the call's outputs; it also says how it will end."""
        answered, optimizer, store = _answered(call, variant), self._user_optimizer, deployment.store
        drift, recordings = self._agreement.drift, deployment.recordings
        stages, share = deployment.stages, call.batch.own_share
        spread = store.divided is not None and bool(store.divided.spread)
        settle = deployment.gradients.delivery.settle

        def begin(grads: Sequence[Tensor | None]) -> None:
            follow_the_last(deployment.device)
            answered()
            scale = next((grad for grad in grads if grad is not None), None) if variant.loss_inside else None
            if scale is not None:
                drift.note_factor(scale)
            if recordings is not None:
                at_end_of_backward(recordings.end_backward)
            finish_backward(CallOfBackward(store, optimizer, share, scale, stages, spread, settle))

        return begin

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: AgreedCall) -> Variant:
        """The call as a Graph, which is the model's."""
        try:
            variant = self._capture(args, kwargs, call)
        except PeerError:
            raise
        except Exception:
            # The script may go on, and speak with other ranks in its own way.
            process.await_connection()
            # All ranks come here, each with an error of its own. Taken to have rows, what has none may be the cause.
            if call.doubt is not None:
                call.doubt.look_and_settle(call.batch)
            raise
        self._set_limits(variant)
        try:
            self._compare(variant, call)
        except CaptureError as error:
            if variant.has_own_trace:
                raise
            self._lengths.give_up(call.key, first_line(error))
            return self._captured(args, kwargs, call)
        return variant

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: AgreedCall) -> Variant:
        sample = Sample(self.model, args, kwargs, self.device, call.own_rows, call.per_row)
        wanted = Wanted(sample, call.batch, self._row_mixing, self._capture_options)

        def tell(why: str) -> None:
            if self._variants.traced < _TOLD_CAPTURES or process.get_rank():
                return
            _log.warning(
                "capture %d of the model, because this is not as at the call before: %s%s. Each takes time, and the "
                "oldest goes when all have more than %d tensors; pass what changes with each call as a tensor",
                self._variants.traced + 1, self._variants.why_new(call.key, call.batch.total), f" ({why})" * bool(why),
                MOST_VALUES,
            )  # fmt: skip

        lines = Lines("Decomposer", "capture")
        with phases.phase("Decomposer", "capture", "the capture of the model"), progress_told(lines.at):
            variant = self._lengths.variant(call.key, wanted, tell)
            # What comes next runs the user's code, which may have messages of its own.
            process.await_connection()
            elements = sum(param.numel() for param in self.name_to_param.values())
            ops, params = len(variant.whole.facts.ops), len(variant.whole.facts.params)
            phases.note(f"{type(self.model).__name__}: {ops} ops, {params} parameters with {elements:,} elements")
            if not variant.has_own_trace:
                phases.note("its lengths put into the trace that serves others")
        agree.together(lambda: refuse_shared(call.tensors, variant.whole.captured.changed_inputs))
        if self._batch_arguments is None:
            variant.refuse_sequences(call.batch)
        self._stale.mark(variant)
        if variant.questions.unchecked and process.get_rank() == 0:
            told = "\n".join(f"  {item.expr} = {item.value} at {item.where}" for item in variant.questions.unchecked)
            _log.warning(
                "the model asks questions about what it computes; every batch must give the answers of this one, and "
                "that is not checked:\n%s", told,
            )  # fmt: skip
        if process.get_rank() == 0:
            tell_of_mixing(variant)
            tell_of_whole_parts(variant)
            if self._deployment is None:
                tell_of_unseen(variant)
            tell_of_groups(variant, call.batch.total)
        return variant

    def _follow(self, variant: Variant) -> bool:
        """Divides a captured call as the deployed one; False when there is none, or when it has just been given up.

        Raises:
            PlanError: the deployed Plan cannot serve the call, nor can one for this call serve the others.
        """
        deployment = self._deployment
        if deployment is None:
            return False
        try:
            variant.follow(self._variants.first)
            agree.together(lambda: deployment.refuse_unheld(variant))
        except PlanError as error:
            missing = [name for name in variant.param_names if name not in deployment.store.holders]
            missing += deployment.added_buffers(variant)
            left_out = [name for name in self._variants.first.param_names if name not in variant.param_names]
            if not missing or left_out:
                raise PlanError(f"{error}. {no_plan_for_both(missing, left_out)}") from None
            if process.get_rank() == 0:
                _log.warning(
                    "this call uses parameters or buffers that the calls before did not, or that were added to the "
                    "model since (%s): the model is deployed anew for it; parameters, gradients and the optimizer's "
                    "state stay. Make such a call the first one to plan once only", ", ".join(missing),
                )  # fmt: skip
            self._give_up_deployment()
            self._stale.mark(variant)
            return False
        if deployment.hold_buffers(variant):
            self._guard_params(deployment)
        return True


def _asked(outputs: Sequence[str | int] | None) -> tuple[str | int, ...] | None:
    if isinstance(outputs, (str, int)) or (outputs is not None and not outputs):
        raise RaNNCError(f'outputs is a list of keys or positions, such as ["loss"] or [0], not {outputs!r}')
    return None if outputs is None else tuple(outputs)


def _load_config() -> configuration.Config:
    loaded = configuration.load()
    for warning in loaded.warnings:
        _log.warning("%s", warning)
    if loaded.config.show_config_items:
        for line in loaded.config.lines():
            _log.info("%s", line)
    return loaded.config


def _ordinary(arguments: Any) -> Any:
    """Arguments with copies in the place of tensors that were made under ``torch.inference_mode()``."""
    tensors, structure = flatten(arguments)
    return structure.rebuild([tensor.clone() if tensor.is_inference() else tensor for tensor in tensors])


def _configured_plan_file(config: configuration.Config) -> Path | None:
    return Path(config.deployment_file) if config.load_deployment else None


def _call(variant: Variant) -> Call:
    if not (torch.is_grad_enabled() and variant.trains):
        return "forward"
    return "whole" if variant.loss_inside else "halves"


def _answered(call: AgreedCall, variant: Variant) -> Callable[[], None]:
    """What to do before gradients are handed over: all ranks hear whether all batches gave the captured answers."""
    if not variant.questions or variant.questions.waits:
        return lambda: None
    answers = call.answers

    def check() -> None:
        with collective("loss.backward()"):
            agree.together(lambda: answers.check() if answers is not None else None)

    return check
