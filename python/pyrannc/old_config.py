"""Configuration items of RaNNC 0.7.5 that are gone, and what does their work now."""

_SEARCH = "the search tries all Plans by itself"
_PROFILES = "Profiles are kept by themselves (profile_cache), or in graph_profile_file"
_RECOMPUTE = "the Plan says what is computed again to save memory"
_WATCHDOG = "failures end all ranks by themselves (stall_timeout_s, silence_timeout_s)"
_COMMUNICATION = "tensors go from device to device, in the order that the Plan says"
_VERIFIED = "each Plan is proven before it runs; verify_partitioning"
_MEASURE = "rannc explain, rannc trace and model.report() tell times"

REPLACED_BY: dict[str, str] = {
    "decomposer": _SEARCH,
    "auto_parallel": _SEARCH,
    "do_coarsening": _SEARCH,
    "do_uncoarsening": _SEARCH,
    "coarsen_by_time": _SEARCH,
    "dp_search_all": _SEARCH,
    "disable_balancing": _SEARCH,
    "limit_dev_num_pot": _SEARCH,
    "limit_dev_num_more_than_bs": _SEARCH,
    "alloc_repl_flat": _SEARCH,
    "max_mp_num": _SEARCH,
    "replica_num": "the search chooses Replicas for each Stage; partition_num and pipeline_num can be forced",
    "min_partition_num": "partition_num forces a number of Stages, max_partition_num limits it",
    "checkpointing": _RECOMPUTE,
    "checkpointing_no_last": _RECOMPUTE,
    "profiling": _MEASURE,
    "graph_profiling": _MEASURE,
    "profiling_iter": _MEASURE,
    "profile_dump_path": _MEASURE,
    "enable_kineto": "torch.profiler works round the training loop as usual",
    "profiler_cache_size": _PROFILES,
    "save_mlpart_results": _PROFILES,
    "load_mlpart_results": _PROFILES,
    "mlpart_results_file": _PROFILES,
    "dump_dp_node_profiles": _PROFILES,
    "dump_dp_cache": _PROFILES,
    "save_alloc_solutions": "save_deployment writes the Plan",
    "load_alloc_solutions": "load_deployment reads a Plan",
    "alloc_solutions_file_prefix": "deployment_file is the Plan's path",
    "dump_graph_prefix": "rannc graph shows captured Graphs",
    "p2p_comm": _COMMUNICATION,
    "use_mpi_to_gather_dist_params": _COMMUNICATION,
    "validate_comm": _VERIFIED,
    "verify_recomp": _VERIFIED,
    "display_act_value": _VERIFIED,
    "run_watchdog": _WATCHDOG,
    "watchdog_lockfile_dir": _WATCHDOG,
    "force_dist_matmul": "matrices are not divided over devices",
    "use_named_tensors": "Values are named after what makes them",
    "conf_dir": "the environment variable RANNC_CONF_DIR says where the file is",
}
"""By item, one clause."""


def told(names: dict[str, str]) -> tuple[str, ...]:
    """One warning for all items that are set.

    Args:
        names: of items, with where each is set.
    """
    if not names:
        return ()
    lines = [f"  {name} ({source}): {REPLACED_BY[name]}" for name, source in names.items()]
    return ("these configuration items of RaNNC 0.7.5 have no effect any more, leave them out:\n" + "\n".join(lines),)
