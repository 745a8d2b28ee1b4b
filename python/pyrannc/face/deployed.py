"""A wrapped model under a Plan: it is deployed, reported on, and taken back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from pyrannc._native import Plan
from pyrannc.call.agreed import AgreedCall, Agreement
from pyrannc.call.batch_arguments import BatchArguments, BatchNames, RowsInDoubt
from pyrannc.call.lengths import Lengths
from pyrannc.call.param_guards import ParamGuards, agree_on_trainable
from pyrannc.call.recaptures import Recaptures
from pyrannc.call.stale import StaleAttributes
from pyrannc.call.variant import Variant
from pyrannc.call.variants import Variants
from pyrannc.config import Config
from pyrannc.core.plan import PlanFacts, content
from pyrannc.face.state import StateOfModel
from pyrannc.job import agree, phases, process
from pyrannc.job.device_memory import collect
from pyrannc.job.faults import announced, watchdog
from pyrannc.ledger import Report, report
from pyrannc.log import get_logger
from pyrannc.planning.decision import decide, dry_run, save_if_asked
from pyrannc.planning.measured import compiled_folder, conditions_of_code
from pyrannc.planning.search import Request
from pyrannc.runtime.compiling import Compiling
from pyrannc.runtime.deployment import Deployment
from pyrannc.store.after_backward import forget_beside
from pyrannc.store.by_parameter import refuse_across, refuse_sparse, why_across
from pyrannc.store.course import course_of
from pyrannc.store.former import Former
from pyrannc.store.later import LaterOptimizers
from pyrannc.store.optimizer import UserOptimizer
from pyrannc.store.own_listed import note_clear
from pyrannc.store.shared_params import note_deployed, note_taken_back
from pyrannc.store.store import ParamStore
from pyrannc.switches import delay_grad_allreduce, switches

_log = get_logger("RaNNCModule")

_deployments = itertools.count(1)
"""Numbers of deployments, which all ranks make together."""


class DeployedModel(StateOfModel):
    """A wrapped model that can be spread over the ranks as a Plan says."""

    optimizer: Optimizer | None
    device: torch.device
    used_param_ids: set[int]
    _config: Config
    _plan_file: Path | None
    _gather_inputs: bool
    _batch_arguments: BatchNames | None
    _check_unused: bool
    _variants: Variants
    _lengths: Lengths
    _stale: StaleAttributes
    _user_optimizer: UserOptimizer | None = None
    _later: LaterOptimizers | None = None
    _compared: str = ""

    def _new_agreement(self) -> Agreement:
        return Agreement(
            self.model,
            self._variants,
            self.optimizer,
            BatchArguments(self.model, self._batch_arguments, gather_inputs=self._gather_inputs),
            gather_inputs=self._gather_inputs,
            recaptures=Recaptures(self._config.recapture_interval),
            course=course_of,
        )

    def _deploy(self, variant: Variant, call: AgreedCall) -> None:
        """Finds a Plan for a captured call and puts it in force; after an error, all is as if nothing had been."""
        former = Former(self.model, self._user_optimizer)
        try:
            plan = self._plan(variant, call)
            if call.doubt is not None and call.doubt.is_open and PlanFacts.of(plan).microbatches > 1:
                self._settle(call.doubt, call)
            self._put_in_force(plan, variant)
        except Exception:
            former.come_back()
            self._forget_deployment()
            raise

    @property
    def _may_cut(self) -> bool:
        """True where parts of a batch are computed by themselves, as far as that is known before there is a Plan."""
        if process.get_world_size() > 1 or self._config.partitioning_dry_run_np:
            return True
        return self._deployment is not None and PlanFacts.of(self._deployment.plan).microbatches > 1

    def _settle(self, doubt: RowsInDoubt, call: AgreedCall) -> None:
        with self._stale.lifted():
            doubt.look_and_settle(call.batch)

    def _plan(self, variant: Variant, call: AgreedCall) -> Plan:
        agree.together(lambda: refuse_sparse(self.optimizer, set(map(id, self.model.parameters()))))
        request = Request(
            variant=variant,
            samples=call.tensors,
            config=self._config,
            optimizer=self.optimizer,
            device=self.device,
            batch_rows=call.batch.total,
            gather_inputs=self._gather_inputs,
            zero=agree.together(self._zero),
        )
        if self._config.partitioning_dry_run_np:
            dry_run(request)
        plan = decide(request, self._plan_file)
        facts = PlanFacts.of(plan)
        agree.together(lambda: refuse_across(self.optimizer, len(facts.stages), self.device, divided=facts.divides))
        return plan

    def _zero(self) -> str:
        """What Replicas may divide: nothing without an optimizer that updates parameters one by one."""
        level = self._config.enable_zero
        if self.optimizer is None or (level == "auto" and why_across(self.optimizer, self.device) is not None):
            return "off"
        return level

    def _put_in_force(self, plan: Plan, variant: Variant) -> None:
        with phases.phase("ParamStorage", "parameters", "the deployment of the Plan"):
            # What trials and measurements leave would be there beside the first step.
            collect(self.device)
            variant.divide(agree.together(lambda: plan.partition(variant.graph)))
            forget_beside(self.model.parameters())
            self.name_to_param = dict(self.model.named_parameters())
            self._deployment = Deployment(
                self.model,
                variant,
                plan,
                self._user_optimizer,
                self.device,
                watchdog(),
                sync_params=switches().sync_params_on_init,
                fused_dropout=self._config.fused_dropout,
                reduce_dtype=self._config.reduce_dtype,
                compiling=self._compiling(plan),
                records=self._config.records_on(self.device.type),
            )
        store = self._deployment.store
        deployment = self._deployment
        self._agreement.deployment = next(_deployments)
        self._note_used_params(store)
        agree.together(lambda: note_deployed(store, self._user_optimizer, self))
        if self._user_optimizer is not None:
            self._user_optimizer.narrow(store)
        agree.together(lambda: self._guard_params(deployment))
        self._later = LaterOptimizers(
            store,
            self.optimizer,
            len(PlanFacts.of(plan).stages),
            self._agreement.drift.watch_other,
            self._agreement.hyper_parameters.watch,
            self._agreement.hyper_parameters.forget,
            lambda: deployment.gradients.pending,
        )
        if process.get_rank() == 0:
            get_logger("DPStaging").info("deployed this plan:\n%s", plan.tables(self._config.mem_limit_bytes))
            save_if_asked(plan, self._config)

    def _compiling(self, plan: Plan) -> Compiling | None:
        if not self._config.compiles_on(self.device.type):
            return None
        facts = PlanFacts.of(plan)
        return Compiling(
            compiled_folder(self._config),
            conditions_of_code(self.device, self._config),
            facts.eager_spans,
            facts.memory_budget_percent,
        )

    def _note_used_params(self, store: ParamStore) -> None:
        self.used_param_ids = set(map(id, store.used.values()))
        unused = [name for name in self.name_to_param if name not in store.used]
        if unused and self._check_unused and process.get_rank() == 0:
            _log.warning("the model does not use these parameters, so it does not train them: %s", ", ".join(unused))

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
        return report(self._deployed("report"), self._compared)

    @announced("undeploy()")
    def undeploy(self) -> None:
        """Gives every rank the whole model and optimizer back, on the host. All ranks call it."""
        self._take_back()

    def _take_back(self) -> None:
        deployment = self._deployed("undeploy")
        store = deployment.store
        # With their parameters here, states go to the right devices.
        deployment.bring_back()
        if self._user_optimizer is not None:
            self._user_optimizer.widen(store)
        if self._later is not None:
            self._later.widen()
        self._stale.keep_computed()
        self._forget_deployment()

    def _forget_deployment(self) -> None:
        if self._later is not None:
            self._later.end()
        if self._deployment is not None:
            note_taken_back(self._deployment.store)
        self._deployment = self._later = None
        self._variants.clear()
        self._lengths.clear()
        self._stale.clear()
        self._agreement = self._new_agreement()
        self.used_param_ids = set()
        self._compared = ""

    def save_deployment(self, file: str | Path) -> None:
        """Writes the Plan to a file."""
        deployment = self._deployed("save_deployment")
        if process.get_rank() == 0:
            deployment.plan.write(str(file))

    # Training

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients; all ranks call it."""
        super().zero_grad(set_to_none)
        if self._deployment is not None and self._user_optimizer is not None:
            # Gradients of others that the optimizer lists stay.
            own = set(map(id, self._deployment.store.params.values()))
            if own.issuperset(self._user_optimizer.listed_ids()):
                note_clear(self._user_optimizer.optimizer)
        if self._later is not None:
            self._later.note_clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As that of ``DistributedDataParallel``: gradients of calls inside are summed over ranks by the next backward.

        It is :func:`pyrannc.delay_grad_allreduce` for a block of code.
        """
        before = switches().delay_grad_allreduce
        delay_grad_allreduce(True)
        try:
            yield
        finally:
            delay_grad_allreduce(before)

    @announced("allreduce_grads()")
    def allreduce_grads(self) -> None:
        """Sums gradients that were left unreduced by ``delay_grad_allreduce(True)``. All ranks call it."""
        self._deployed("allreduce_grads").gradients.reduce_pending()

    def _follow_trainable(self) -> None:
        """Takes over that ``requires_grad`` of some parameters has changed; all ranks do."""
        deployment = self._deployed("forward")
        store, optimizer = deployment.store, self._user_optimizer
        agree_on_trainable(store.params, store.local_params())
        grads = store.take_spread_grads()
        if optimizer is not None:
            optimizer.join_parts(store)
        deployment.renew_gradients()
        store.put_grads(grads)
        if optimizer is not None:
            optimizer.divide_anew(store)
        self._guard_params(deployment)

    def _guard_params(self, deployment: Deployment) -> None:
        store, leaves = deployment.store, deployment.gradients.leaves
        own = {name: param for name, param in store.local_params().items() if name in leaves}
        divided = store.divided
        spread = [] if divided is None else [store.params[name] for name in divided.spread]
        trainable = [param.requires_grad for param in store.used.values()]
        self._agreement.params = ParamGuards(self.model, own, leaves, store.local_buffers(), trainable, spread)
        whole = {name: param for name, param in store.local_params().items() if not store.is_in_parts(name)}
        self._agreement.drift.watch(whole, store.holders)
        optimizer = self._user_optimizer
        if optimizer is not None:
            self._agreement.drift.watch_beside(lambda: optimizer.beside(store))

    def _give_up_deployment(self) -> None:
        """Like ``undeploy()``, but gradients stay."""
        deployment = self._deployed("forward")
        deployment.gradients.reduce_pending()
        grads = {name: deployment.store.full_grad(name, param) for name, param in deployment.store.params.items()}
        self._take_back()
        for name, param in deployment.store.params.items():
            param.grad = grads[name]
