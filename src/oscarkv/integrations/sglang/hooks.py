"""Where the plugin enters SGLang. Nothing here changes a server that does not ask for oscarkv."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from oscarkv.errors import OscarError
from oscarkv.integrations.serving import refusal
from oscarkv.integrations.sglang import fork, options


def install() -> None:
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    add_attention_backend_choices([options.NAME])
    register_attention_backend(options.NAME)(_attention)
    register_radix_cache_backend(options.NAME, _tree)
    register_resolution_hook("handle_attention_backend_compatibility")(_resolve)
    Engine.server_args_class = staticmethod(_server_args)
    for target, hook in HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    refusal.print_refusals_as_lines()


def install_version_refusal(error: OscarError) -> None:
    """For an SGLang whose interfaces are unknown: stop servers that ask for oscarkv, no others."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    def refuse(server_args: Any, previous: Callable[[Any], None]) -> None:
        if options.asked_for(server_args):
            raise error
        previous(server_args)

    add_attention_backend_choices([options.NAME])
    register_resolution_hook("handle_model_specific_adjustments")(refuse)
    HookRegistry.register(
        "sglang.srt.server_args.ServerArgs.add_cli_args", _add_cli_args, HookType.AROUND
    )
    refusal.print_refusals_as_lines()


# -- arguments -------------------------------------------------------------------------------------


def _add_cli_args(plain: Any, parser: Any) -> None:
    plain(parser)
    options.add_arguments(parser)
    fork.recognise(parser)


def _from_cli_args(plain: Any, cls: Any, arguments: Any) -> Any:
    fork.refuse(arguments)
    made = plain(cls, arguments)
    options.keep(made, options.take(dict(vars(arguments))))
    return made


def _server_args(**arguments: Any) -> Any:
    """For `Engine(...)`, whose arguments are those of ServerArgs."""
    from sglang.srt.server_args import ServerArgs

    ours = options.take(arguments)
    made = ServerArgs(**arguments)
    options.keep(made, ours)
    return made


def _resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    """In the process that starts the server, as SGLang settles what was asked for."""
    previous(server_args)
    from oscarkv.integrations.sglang.check import check_config

    check_config(server_args)


# -- what SGLang makes -----------------------------------------------------------------------------


def _attention(runner: Any) -> Any:
    from oscarkv.integrations.sglang.backend import OscarAttention

    return OscarAttention(runner)


def _tree(context: Any) -> Any:
    from oscarkv.integrations.sglang.tree import make_tree

    return make_tree(context)


def _pool_class(plain: Any, platform: Any, *, kind: str) -> Any:
    if options.active() is None or kind != "mha":
        return plain(platform, kind=kind)
    from oscarkv.integrations.sglang.pool import OscarPool

    return OscarPool


def _allocator_class(plain: Any, platform: Any) -> Any:
    if options.active() is None:
        return plain(platform)
    from oscarkv.integrations.sglang.allocator import OscarAllocator

    return OscarAllocator


def _cell_size(plain: Any, configurator: Any, cache: Any, num_layers: int) -> int:
    """Bytes a token, for SGLang's sizing."""
    settings = options.active()
    if settings is None:
        return int(plain(configurator, cache, num_layers))
    from sglang.srt.runtime_context import get_parallel

    from oscarkv.integrations.sglang.capacity import Capacity

    model = cache.model_config
    heads = model.get_num_kv_heads(get_parallel().attn_tp_size)
    dim, dtype = model.head_dim, cache.kv_cache_dtype
    recipe, length = settings.recipe, model.context_len
    return Capacity(num_layers, heads, dim, dtype, recipe, length, settings.others).token_bytes


def _load_model(plain: Any, runner: Any, *arguments: Any, **settings: Any) -> Any:
    """In every worker. Drafts are models of their own."""
    made = plain(runner, *arguments, **settings)
    asked = options.settings_of(runner.server_args)
    if asked is None or runner.is_draft_worker or runner.server_args.load_format == "dummy":
        return made
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    from oscarkv.integrations.serving.weights import check_weights

    model = runner.model_config
    widths = {model.hidden_size, model.head_dim}
    try:
        check_weights(asked.loaded, runner.model, model.model_path, VocabParallelEmbedding, widths)
    except OscarError as error:
        refusal.refuse(error)
    return made


def _wait_for_scheduler_ready(plain: Any, *arguments: Any, **settings: Any) -> Any:
    """In the process that starts the server, when another one fails."""
    try:
        return plain(*arguments, **settings)
    except RuntimeError:
        reason = refusal.heard()
        if reason is None:
            raise
        raise reason from None


# -- what the scheduler does -----------------------------------------------------------------------


def _ours(batch_or_tree: Any) -> Any:
    """Our allocator, if that is what a batch or a radix cache has."""
    from oscarkv.integrations.sglang.allocator import OscarAllocator

    allocator = batch_or_tree.token_to_kv_pool_allocator
    return allocator if isinstance(allocator, OscarAllocator) else None


def _alloc_for_extend(plain: Any, batch: Any) -> Any:
    allocator = _ours(batch)
    if allocator is not None:
        allocator.hold_hits(batch)
    made = plain(batch)
    if allocator is not None:
        allocator.extend(batch)
    return made


def _alloc_for_decode(plain: Any, batch: Any, token_per_req: int) -> Any:
    made = plain(batch, token_per_req)
    allocator = _ours(batch)
    if allocator is not None:
        allocator.advance(batch)
    return made


def _release_kv_cache(plain: Any, req: Any, tree_cache: Any, **settings: Any) -> Any:
    allocator = _ours(tree_cache)
    if allocator is not None:
        allocator.windows.finish(req.rid)
    return plain(req, tree_cache, **settings)


_MEMORY = "sglang.srt.mem_cache"
#: SGLang logs a hook that it cannot apply and goes on: `check.py` sees whether all were.
HOOKS: dict[str, Callable[..., Any]] = {
    "sglang.srt.server_args.ServerArgs.add_cli_args": _add_cli_args,
    "sglang.srt.server_args.ServerArgs.from_cli_args": _from_cli_args,
    "sglang.srt.platforms.interface.SRTPlatform.get_kv_pool_cls": _pool_class,
    "sglang.srt.platforms.interface.SRTPlatform.get_paged_allocator_cls": _allocator_class,
    "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size": (
        _cell_size
    ),
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model": _load_model,
    "sglang.srt.entrypoints.engine._wait_for_scheduler_ready": _wait_for_scheduler_ready,
    f"{_MEMORY}.allocation.alloc_for_extend": _alloc_for_extend,
    f"{_MEMORY}.allocation.alloc_for_decode": _alloc_for_decode,
    f"{_MEMORY}.common.release_kv_cache": _release_kv_cache,
}
