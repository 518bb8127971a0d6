"""`oscarkv eval tasks`: problems with known answers, with full precision and with packed caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from oscarkv.cli import gather, options
from oscarkv.cli.console import interruptible, progress_bar, results
from oscarkv.cli.task_place import Place
from oscarkv.errors import MissingDependencyError, OscarError

if TYPE_CHECKING:
    from oscarkv.evaluation.tasks.plan import Plan
    from oscarkv.evaluation.tasks.record import TasksRecord
    from oscarkv.evaluation.tasks.requests import Engine, Sampling
    from oscarkv.evaluation.tasks.run import TaskPlan
    from oscarkv.evaluation.tasks.task import Task

TABLE_WIDTH = 110
ENGINES = ("transformers", "vllm")


def tasks(
    model: options.ModelArgument,
    listed: Annotated[
        str,
        typer.Option(
            "--tasks", metavar="A,B,...", help="Tasks, or lm-eval:NAME; `list` shows ours."
        ),
    ] = "",
    plan_name: Annotated[
        str | None,
        typer.Option("--plan", metavar="NAME", help="A protocol: paper, or a .toml file."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK=FILE", help="A task's problems; without, from the hub."),
    ] = None,
    examples: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK=FILE", help="Where worked examples come from."),
    ] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="Worked examples.", show_default="the task's own")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first N problems only.")] = None,
    engine: Annotated[str, typer.Option(help="transformers or vllm.")] = "transformers",
    artifact: gather.ArtifactOption = None,
    recipes: gather.RecipesOption = "",
    calibration_text: gather.CalibrationTextOption = None,
    tokens: gather.TokensOption = 30000,
    sink: Annotated[int | None, typer.Option(min=0, help="Instead of the recipe's.")] = None,
    recent: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Times each problem is asked.", show_default="1")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0: greedy.", show_default="0")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Of the sampling.", show_default="1")] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="Of the sampling; 0: no limit.", show_default="0")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer.", show_default="the task's own")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Ask as a chat message, or have a text continued.",
            show_default="chat where there is a template and no worked examples",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts at once, on Transformers.")] = 8,
    baseline: Annotated[
        str,
        typer.Option(
            metavar="BACKEND",
            help="vLLM's attention for full precision.",
            show_default="FLASH_ATTN on a GPU",
        ),
    ] = "",
    engine_options: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-option", metavar="NAME=JSON", help="Any other argument of vllm.LLM; repeat."
        ),
    ] = None,
    run_code: Annotated[
        bool,
        typer.Option(
            "--run-code",
            help="Let HumanEval and LiveCodeBench run what the model wrote: in a process with "
            "limits, but better inside a container.",
        ),
    ] = False,
    include_path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="More tasks for lm-eval, as YAML.")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="OUT", help="Every answer; a run goes on from there."),
    ] = None,
    log_file: Annotated[
        Path | None, typer.Option("--log", metavar="OUT", help="What vLLM says.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Prompts, too, read the packed cache throughout.")
    ] = False,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = "auto",
    backend: options.BackendOption = "auto",
) -> None:
    """Solve problems with the full-precision cache and with packed ones, and compare.

    All settings get the same prompts; gaps are taken problem by problem, with their interval.
    With --json the answers are kept as they come, and the same command goes on from there.

    Example: oscarkv eval tasks MODEL --tasks gsm8k --data gsm8k=test.jsonl --examples
    gsm8k=train.jsonl --artifact FILE --engine vllm --json gsm8k.json
    """
    from oscarkv.evaluation.tasks.harness import evaluate, require_same
    from oscarkv.evaluation.tasks.plan import load_plan
    from oscarkv.evaluation.tasks.record import REFERENCE, load_record
    from oscarkv.evaluation.tasks.registry import TASKS
    from oscarkv.evaluation.tasks.run import TaskPlan, run_setting

    if listed == "list":
        for task in TASKS.values():
            results.print(f"{task.name:16} {task.title} ({task.hub.dataset})", highlight=False)
        return
    if engine not in ENGINES:
        raise OscarError(f"no engine {engine!r}; there are {', '.join(ENGINES)}")
    for path in filter(None, (json_file, log_file)):
        options.require_writable(path)
    wanted = gather.recipes(recipes, bool(calibration_text))
    if engine == "vllm" and wanted:
        raise OscarError("vLLM needs finished artifacts: oscarkv calibrate, then --artifact")
    protocol = load_plan(plan_name, model) if plan_name is not None else None
    if not artifact and not wanted:
        if protocol is None or json_file is None:
            raise OscarError("nothing to compare: give --artifact, --recipes or both")
        artifact = [json_file.with_suffix(".safetensors")]  # made below
    else:
        options.require_files([*(artifact or []), *(calibration_text or [])])
    if protocol is not None:
        listed = listed or ",".join(protocol.tasks)
        max_new_tokens = max_new_tokens or protocol.max_new_tokens
        chat = protocol.chat if chat is None else chat
    chosen, harnessed = _chosen(listed, run_code)
    sources, shown = _paths(data, "--data"), _paths(examples, "--examples")
    sampling = _sampling(protocol, temperature, top_p, top_k)
    count = seeds or (protocol.seeds if protocol is not None else 1)
    if count > 1 and sampling.greedy:
        raise OscarError(f"--seeds {count} would ask the same {count} times; set --temperature")
    knobs = _knobs(protocol, dtype, engine_options or [])
    if engine == "vllm":
        _require_vllm()

    from oscarkv.evaluation.tasks.data import problems

    plain = [
        TaskPlan(
            task=task,
            problems=problems(task, sources.get(task.name), limit),
            examples=_examples(task, shots, shown.get(task.name)),
            chat=False,
            max_new_tokens=max_new_tokens or task.max_new_tokens,
            seeds=range(count),
            sampling=sampling,
            template=protocol.template if protocol is not None else {},
            data=str(sources[task.name].name) if task.name in sources else task.hub.dataset,
        )
        for task in chosen
    ]
    if artifact and not artifact[0].exists():
        gather.calibrate_apart(model, artifact[0], calibration_text or [], tokens)
    loaded_artifacts = gather.load_artifacts(artifact or [], [r.name for r in wanted])
    earlier = load_record(json_file) if json_file is not None and json_file.exists() else None
    place = Place(model, engine, device, dtype)
    plans = [_with_chat(plan, chat, place.tokenizer) for plan in plain]
    record, prompts = _start(place, engine, plans, earlier)
    require_same(harnessed, record.tasks, sampling, max_new_tokens)
    found = loaded_artifacts | place.fit(calibration_text, wanted, tokens)
    changed = {name: gather.with_windows(one, sink, recent) for name, one in found.items()}
    described = place.describe_settings(changed, strict, backend, baseline, knobs)
    record.settings = gather.same_settings(earlier.settings if earlier else {}, described)
    files = dict(zip(loaded_artifacts, artifact or [], strict=True))
    longest = _longest(plans, prompts, place.context, bool(harnessed))

    def make(name: str) -> Engine:
        if engine == "transformers":
            return place.engine(changed.get(name), batch, backend, strict)
        section: dict[str, Any] = {}
        if name != REFERENCE:
            recipe = changed[name].recipe
            section = {"artifact": str(files[name].resolve()), "strict": strict}
            section |= {"sink": recipe.sink, "recent": recipe.recent, "backend": backend}
        return place.vllm(name, section, baseline, longest, knobs, log_file)

    with interruptible("answers so far are", json_file):
        for name in (REFERENCE, *changed):
            with progress_bar("asking") as progress:
                run_setting(
                    name,
                    make(name),
                    plans,
                    prompts,
                    record,
                    context=place.context,
                    path=json_file,
                    progress=progress,
                )
            for seed in range(count) if harnessed else ():
                evaluate(
                    harnessed,
                    make(name),
                    place.tokenizer,
                    name,
                    record.tasks,
                    context=place.context,
                    shots=shots,
                    limit=limit,
                    chat=bool(chat),
                    max_new_tokens=max_new_tokens,
                    seed=seed,
                    sampling=sampling,
                    include_path=include_path,
                    run_code=run_code,
                )
                if json_file is not None:
                    record.save(json_file)
    _print(record)


def _chosen(listed: str, run_code: bool) -> tuple[list[Task], list[str]]:
    """Our tasks, and the names of lm-eval's."""
    from oscarkv.evaluation.tasks.harness import PREFIX
    from oscarkv.evaluation.tasks.registry import TASKS, get_task

    names = list(dict.fromkeys(part.strip() for part in listed.split(",") if part.strip()))
    if not names:
        raise OscarError(f"name some --tasks of {', '.join(TASKS)}, or a --plan")
    harnessed = [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]
    chosen = [get_task(name) for name in names if not name.startswith(PREFIX)]
    coded = [task.name for task in chosen if task.runs_code]
    if coded and not run_code:
        raise OscarError(
            f"{', '.join(coded)} runs programs that the model wrote; allow it with --run-code, "
            "in a container"
        )
    return chosen, harnessed


def _sampling(
    protocol: Plan | None, temperature: float | None, top_p: float | None, top_k: int | None
) -> Sampling:
    from oscarkv.evaluation.tasks.requests import Sampling

    plain = protocol.sampling if protocol is not None else Sampling()
    return Sampling(
        plain.temperature if temperature is None else temperature,
        plain.top_p if top_p is None else top_p,
        plain.top_k if top_k is None else top_k,
    )


def _knobs(protocol: Plan | None, dtype: str, given: Sequence[str]) -> dict[str, Any]:
    """Of vLLM: the plan's, then --dtype, then what --engine-option says."""
    knobs = dict(protocol.engine) if protocol is not None else {}
    if dtype != "auto":
        knobs["dtype"] = dtype
    return knobs | options.engine_options(given)


def _start(
    place: Place, engine: str, plans: Sequence[TaskPlan], earlier: TasksRecord | None
) -> tuple[TasksRecord, dict[str, list[list[int]]]]:
    """A record with what an earlier run has answered, and every task's prompts."""
    from oscarkv.evaluation.tasks.record import TasksRecord
    from oscarkv.evaluation.tasks.run import merge, prepare

    record = TasksRecord({"model": place.name, "engine": engine, **gather.about()})
    for what in ("model", "engine"):
        if earlier is not None and earlier.about.get(what) != record.about[what]:
            raise OscarError(
                f"the file given with --json was made with another {what}; give another name"
            )
    kept = earlier.tasks if earlier is not None else {}
    prompts = {}
    for plan in plans:
        name = plan.task.name
        fresh, prompts[name] = prepare(plan, place.tokenizer, place.context)
        record.tasks[name] = merge(fresh, kept.get(name), name)
    record.tasks |= {name: task for name, task in kept.items() if name not in record.tasks}
    return record, prompts


def _with_chat(plan: TaskPlan, chat: bool | None, tokenizer: Any) -> TaskPlan:
    template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not template:
        raise OscarError("this model's tokenizer has no chat template; use --no-chat")
    return dataclasses.replace(plan, chat=template and not plan.examples if chat is None else chat)


def _examples(task: Any, shots: int | None, source: Path | None) -> list[Any]:
    from oscarkv.evaluation.tasks.data import problems

    count = shots if shots is not None else (task.shots if source is not None else 0)
    if not count:
        return []
    if source is None:
        raise OscarError(f"--shots {count}: say where they are from, with --examples {task.name}=")
    found = problems(task, source, count)
    if len(found) < count:
        raise OscarError(f"{source} has {len(found)} examples, --shots asks for {count}")
    return found


def _paths(texts: Sequence[str] | None, option: str) -> dict[str, Path]:
    found = {}
    for text in texts or []:
        name, equals, path = text.partition("=")
        if not equals:
            raise OscarError(f"{option} {text}: write TASK=FILE")
        found[name] = Path(path)
        if not found[name].exists():
            raise OscarError(f"{path} does not exist")
    return found


def _longest(
    plans: Sequence[TaskPlan], prompts: dict[str, Any], context: int, harnessed: bool
) -> int:
    """Tokens of the longest request: the engine's max_model_len, the same for all settings."""
    if harnessed and context:  # lm-eval's prompts are not known yet
        return context
    lengths = [max(map(len, prompts[p.task.name])) + p.max_new_tokens for p in plans]
    longest = max(lengths, default=context)
    return min(longest, context) if context else longest


def _require_vllm() -> None:
    import importlib.util

    if importlib.util.find_spec("vllm") is None:
        raise MissingDependencyError('--engine vllm needs vLLM: pip install "oscarkv[vllm]"')


def _print(record: TasksRecord) -> None:
    from oscarkv.evaluation.tasks import report

    Console(width=max(results.width, TABLE_WIDTH)).print(report.table(record))
