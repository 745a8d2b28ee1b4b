"""``RaNNCModule``: the user's model, trained by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from pyrannc import config as configuration
from pyrannc._native import Plan
from pyrannc.call.agreed import AgreedCall, Agreement
from pyrannc.call.batch_arguments import BatchArguments, BatchNames
from pyrannc.call.param_guards import ParamGuards, agree_on_trainable, refuse_hooks_on
from pyrannc.call.single_row import first_normalising
from pyrannc.call.stale import StaleAttributes
from pyrannc.call.unwrap import unwrapped
from pyrannc.call.variant import MOST_VARIANTS, CallKey, RowMixing, Variant, Variants
from pyrannc.capture import flatten
from pyrannc.core.plan import PlanFacts, content
from pyrannc.core.program import Call, RankProgram
from pyrannc.errors import PlanError, RaNNCError
from pyrannc.face.state import StateOfModel, refuse_unavailable
from pyrannc.job import agree, phases, process
from pyrannc.job.faults import announced, collective, watchdog
from pyrannc.ledger import Report, report
from pyrannc.log import get_logger
from pyrannc.planning import Request, decide, dry_run, save_if_asked
from pyrannc.proof import prove
from pyrannc.runtime.context import StageContext
from pyrannc.runtime.deployment import Deployment
from pyrannc.runtime.step import Step, StepOptions
from pyrannc.store.later import LaterOptimizers
from pyrannc.store.optimizer import NarrowedOptimizer
from pyrannc.store.store import ParamStore
from pyrannc.switches import switches

_log = get_logger("RaNNCModule")
_LARGE_TAIL = 0.2
"""Share of the Ops from which on a part that every rank computes deserves a word."""

_TOLD_CAPTURES = 2
"""One for training and one for evaluation are what scripts have."""


class RaNNCModule(StateOfModel):
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
        enable_zero: not available yet; raises.
        check_unused_values: warn about parameters that the model does not use.
        offload_params: not available yet; raises.
        row_mixing: where the model lets rows of the batch meet other than in a sum or a mean, what they are:
            ``"batch"``: all rows of the global batch, as in one process; this part of the model, and what follows
            it, is computed on all rows by every rank. ``"microbatch"``: the rows of a microbatch on one Replica.
        batch_arguments: names or positions of the arguments whose tensors have the rows of the batch as dimension 0,
            all others having none. By default the first tensor has them, and others of that extent, if they must; of
            one that need not an error asks.
        leaf_modules: names of sub-modules that are kept whole, as ``model.named_modules()`` has them: what cannot be
            captured inside of them, such as shapes that depend on data, runs as it is, for each part of the batch.

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
    ) -> None:
        options = {
            "gather_inputs": gather_inputs,
            "load_deployment": load_deployment,
            "check_unused_values": check_unused_values,
            "row_mixing": row_mixing,
            "batch_arguments": batch_arguments,
            "leaf_modules": leaf_modules,
        }
        super().__init__(unwrapped(model), options)
        if row_mixing not in get_args(RowMixing):
            raise RaNNCError(f'row_mixing is "batch" or "microbatch", not {row_mixing!r}')
        refuse_unavailable(enable_apex_amp or allreduce_amp_master_params, enable_zero, offload_params)
        self.optimizer = optimizer
        self.device = process.own_device()
        self.name_to_param = dict(self.model.named_parameters())
        self.used_param_ids: set[int] = set()
        self._gather_inputs = gather_inputs
        self._row_mixing = row_mixing
        self._batch_arguments = batch_arguments
        self._leaf_modules = tuple(leaf_modules)
        self._check_unused = check_unused_values
        self._config = _load_config()
        self._plan_file = Path(load_deployment) if load_deployment is not None else _configured_plan_file(self._config)
        self._deployment: Deployment | None = None
        self._narrowed: NarrowedOptimizer | None = None
        self._later: LaterOptimizers | None = None
        self._variants = Variants()
        self._stale = StaleAttributes()
        self._agreement = self._new_agreement()
        self._proven = False
        self._made = True

    def _new_agreement(self) -> Agreement:
        return Agreement(
            self.model,
            self._variants,
            self.optimizer,
            BatchArguments(self.model, self._batch_arguments, gather_inputs=self._gather_inputs),
            gather_inputs=self._gather_inputs,
            recapture_interval=self._config.recapture_interval,
        )

    # The call

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
        with collective("model(...)", new_round=True):
            if not torch.is_inference_mode_enabled():
                return self._run(args, kwargs)
            # What lives on after the call, such as leaves and buffers, must be ordinary tensors.
            with torch.inference_mode(False), torch.no_grad():
                return self._run(*_ordinary((args, kwargs)))

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.device = process.ensure_process_group().device
        call = self._agreement.agree(args, kwargs, self.device)
        if call is None:
            self._follow_trainable()
            call = self._agreement.agree(args, kwargs, self.device)
            assert call is not None, "requires_grad has just been agreed on"
        variant = call.variant
        if variant is None:
            variant = self._capture(args, kwargs, call)
            if not self._follow(variant):
                self._deploy(variant, call)
                call = replace(call, key=(call.key[0], self._agreement.flags))
            if process.get_rank() == 0:
                _tell_of_normalising(variant, self._deployed("forward").plan)
            self._keep(call.key, variant)
            call = replace(call, drawn=agree.broadcast_object(self._agreement.draw(variant)))
        self._variants.use(variant)
        deployment = self._deployed("forward")
        program = variant.program(deployment.plan, call.rows, self._gather_inputs, _call(variant))
        deployment.sync_buffers(variant, program)
        if self._config.verify_partitioning and not self._proven and program.call != "forward":
            self._prove(deployment, variant, program, call)
        options = StepOptions(reduce=not switches().delay_grad_allreduce, keep_graph=switches().keep_graph)
        context = deployment.context(variant)
        step = Step(context, program, call.tensors, call.drawn, variant, options, call.rows, _answered(call, variant))
        return variant.whole.captured.rebuild_outputs(step.results())

    def _prove(self, deployment: Deployment, variant: Variant, program: RankProgram, call: AgreedCall) -> None:
        """Compares the call with one process, once."""
        if not self._gather_inputs:
            raise RaNNCError("verify_partitioning needs gather_inputs=True: each rank with rows of its own")
        options = StepOptions(reduce=True, keep_graph=False)

        def begin(context: StageContext) -> Step:
            return Step(context, program, call.tensors, call.drawn, variant, options, call.rows)

        self._proven = True
        with phases.phase("RaNNCModule", "proof", "the proof"):
            prove(self.model, deployment, variant, program, call.tensors, call.rows, call.drawn, begin)

    def _keep(self, key: CallKey, variant: Variant) -> None:
        dropped = self._variants.add(key, variant)
        if dropped is not None:
            self._deployed("forward").forget(dropped)

    def _follow_trainable(self) -> None:
        """Takes over that ``requires_grad`` of some parameters has changed; all ranks do."""
        deployment = self._deployed("forward")
        agree_on_trainable(deployment.store.params, deployment.store.local_params())
        deployment.renew_gradients()
        self._guard_params(deployment)

    def _guard_params(self, deployment: Deployment) -> None:
        store, leaves = deployment.store, deployment.gradients.leaves
        own = {name: param for name, param in store.local_params().items() if name in leaves}
        trainable = [param.requires_grad for name, param in store.params.items() if name in store.holders]
        self._agreement.params = ParamGuards(self.model, own, leaves, store.local_buffers(), trainable)

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: AgreedCall) -> Variant:
        if self._variants.made >= _TOLD_CAPTURES and process.get_rank() == 0:
            _log.warning(
                "capture %d of the model, because this is not as at the call before: %s. Each takes time, the last "
                "%d are kept; pass what changes with each call as a tensor",
                self._variants.made + 1, self._variants.why_new(call.key), MOST_VARIANTS,
            )  # fmt: skip
        with phases.phase("Decomposer", "capture", "the capture of the model"):
            options = call.own_rows, call.has_rows, self._row_mixing, self._leaf_modules
            variant = Variant(self.model, args, kwargs, self.device, *options)
            elements = sum(param.numel() for param in self.name_to_param.values())
            ops, params = len(variant.whole.facts.ops), len(variant.whole.facts.params)
            phases.note(f"{type(self.model).__name__}: {ops} ops, {params} parameters with {elements:,} elements")
        self._stale.mark(variant)
        if variant.questions.unchecked and process.get_rank() == 0:
            told = "\n".join(f"  {item.expr} = {item.value} at {item.where}" for item in variant.questions.unchecked)
            _log.warning(
                "the model asks questions about what it computes; every batch must give the answers of this one, and "
                "that is not checked:\n%s", told,
            )  # fmt: skip
        if process.get_rank() == 0:
            _tell_of_mixing(variant)
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
            left_out = [name for name in self._variants.first.param_names if name not in variant.param_names]
            if not missing or left_out:
                raise PlanError(f"{error}. {_no_plan_for_both(missing, left_out)}") from None
            if process.get_rank() == 0:
                _log.warning(
                    "this call uses parameters that the calls before did not, or that were added to the model since "
                    "(%s): the model is deployed anew for it; parameters, gradients and the optimizer's state stay. "
                    "Make such a call the first one to plan once only", ", ".join(missing),
                )  # fmt: skip
            self._give_up_deployment()
            self._stale.mark(variant)
            return False
        return True

    def _give_up_deployment(self) -> None:
        """Like ``undeploy()``, but gradients stay."""
        deployment = self._deployed("forward")
        if deployment.gradients.pending:
            deployment.gradients.reduce_delivered()
        grads = {name: deployment.store.full_grad(name, param) for name, param in deployment.store.params.items()}
        self._take_back()
        for name, param in deployment.store.params.items():
            param.grad = grads[name]

    # Deployment

    def _deploy(self, variant: Variant, call: AgreedCall) -> None:
        request = Request(
            variant=variant,
            samples=call.tensors,
            config=self._config,
            optimizer=self.optimizer,
            device=self.device,
            batch_rows=sum(call.rows),
            gather_inputs=self._gather_inputs,
        )
        if self._config.partitioning_dry_run_np:
            dry_run(request)
        agree.together(lambda: refuse_hooks_on(dict(self.model.named_parameters())))
        plan = decide(request, self._plan_file)
        with phases.phase("ParamStorage", "parameters", "the deployment of the Plan"):
            variant.divide(agree.together(lambda: plan.partition(variant.graph)))
            self.name_to_param = dict(self.model.named_parameters())
            self._deployment = Deployment(
                self.model,
                variant,
                plan,
                self.device,
                watchdog(),
                sync_params=switches().sync_params_on_init,
                fused_dropout=self._config.fused_dropout,
            )
        store = self._deployment.store
        deployment = self._deployment
        agree.together(lambda: self._guard_params(deployment))
        self._note_used_params(store)
        narrow = self._narrowing(store)
        if self.optimizer is not None:
            optimizer = self.optimizer
            self._narrowed = agree.together(lambda: narrow(optimizer))
        self._later = LaterOptimizers(store.params.values(), self.optimizer, narrow)
        if process.get_rank() == 0:
            get_logger("DPStaging").info("deployed this plan:\n%s", plan.tables(self._config.mem_limit_bytes))
            save_if_asked(plan, self._config)

    def _narrowing(self, store: ParamStore) -> Callable[[Optimizer], NarrowedOptimizer]:
        """How optimizers come to list only what this rank holds."""
        names = {id(param): name for name, param in self.name_to_param.items()}
        owned = store.owned()
        return lambda optimizer: NarrowedOptimizer(optimizer, names, store.is_local, owned.__contains__)

    def _note_used_params(self, store: ParamStore) -> None:
        used = {name: param for name, param in self.name_to_param.items() if name in store.holders}
        self.used_param_ids = set(map(id, used.values()))
        unused = [name for name in self.name_to_param if name not in used]
        if unused and self._check_unused and process.get_rank() == 0:
            _log.warning("the model does not use these parameters, which will not be trained: %s", ", ".join(unused))

    @property
    def plan(self) -> dict[str, Any]:
        """The deployed Plan as the content of its file: Stages, ranks, microbatches, predicted time and memory."""
        return content(self._deployed("plan").plan)

    @announced("report()")
    def report(self) -> Report:
        """What the Plan predicted beside what the last training steps took. All ranks call it.

        Printed, it is a table; ``to_json()`` gives all figures. It waits for the device, which measuring never does.

        Raises:
            RaNNCError: there have not been two training steps in a row yet.
        """
        return report(self._deployed("report"))

    @announced("undeploy()")
    def undeploy(self) -> None:
        """Gives every rank the whole model and optimizer back, on the host. All ranks call it."""
        self._take_back()

    def _take_back(self) -> None:
        deployment = self._deployed("undeploy")
        deployment.bring_back()
        # With their parameters here, states go to the right devices.
        for narrowed in (self._narrowed, self._later):
            if narrowed is not None:
                narrowed.widen()
        self._deployment = self._narrowed = self._later = None
        self._variants.clear()
        self._stale.clear()
        self._agreement = self._new_agreement()
        self.used_param_ids = set()

    def save_deployment(self, file: str | Path) -> None:
        """Writes the Plan to a file."""
        deployment = self._deployed("save_deployment")
        if process.get_rank() == 0:
            deployment.plan.write(str(file))

    # Training

    @announced("allreduce_grads()")
    def allreduce_grads(self) -> None:
        """Sums gradients that were left unreduced by ``delay_grad_allreduce(True)``. All ranks call it."""
        self._deployed("allreduce_grads").gradients.reduce_delivered()


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


def _tell_of_mixing(variant: Variant) -> None:
    tail = variant.tail
    if tail is None or not tail.mixing:
        return
    share = len(tail.ops) / len(variant.whole.facts.ops)
    large = (
        f" They are {share:.0%} of the model, computed by every rank on all rows of the batch, in one piece. "
        'RaNNCModule(..., row_mixing="microbatch") lets each microbatch mix its own rows instead; a custom function '
        "may also be written so that it treats each row by itself"
    )
    _log.warning(
        "%s: rows of the batch meet there. It and what follows runs once a step, on the whole batch.%s",
        variant.first_mixing(),
        large if share > _LARGE_TAIL else "",
    )


def _tell_of_normalising(variant: Variant, plan: Plan) -> None:
    place, facts = first_normalising(variant.captured), PlanFacts.of(plan)
    if place is not None and (facts.microbatches > 1 or any(len(stage.ranks) > 1 for stage in facts.stages)):
        _log.warning(
            "%s normalises over the rows in hand: each Replica its own rows of each microbatch, not the global batch. "
            "Layers such as nn.GroupNorm and nn.LayerNorm treat each row by itself",
            place,
        )


def _no_plan_for_both(missing: Sequence[str], left_out: Sequence[str]) -> str:
    if not missing:
        return "Call undeploy() before this kind of call, or make it the first one"
    return (
        f"This call uses {', '.join(missing)} and not {', '.join(left_out)}, the call that the plan was made for the "
        "other way round: make the first call one that uses all of them, as a model does that computes both and "
        "chooses with torch.where, or call undeploy() in between"
    )


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
