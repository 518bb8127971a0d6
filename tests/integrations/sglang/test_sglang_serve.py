"""`sglang.launch_server` and the OpenAI client: what a user meets."""

import asyncio
import random
import time

import pytest

pytest.importorskip("sglang.srt.plugins")

import openai
import tiny
import torch
from serving_models import prompts
from sglang_servers import Server

pytestmark = pytest.mark.slow
GREEDY = {"model": "tiny", "temperature": 0}
EXTRA = {"ignore_eos": True, "return_token_ids": True}
CLIENTS, REQUESTS = 32, 500


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    """Too few tokens for what 32 clients ask: requests wait, and evict each other's prefixes."""
    tiny.tokenizer().save_pretrained(tiny_model.path)
    knobs = ("--context-length", "4096", "--max-running-requests", str(CLIENTS))
    pool = ("--max-total-tokens", "16384", "--chunked-prefill-size", "2048")
    folder = tmp_path_factory.mktemp("server")
    with Server(tiny_model, folder, "--oscarkv-strict", *knobs, *pool) as started:
        yield started


@pytest.fixture(scope="module")
def canary(tiny_model):
    """A prompt, what `OscarCache` answers, and that this is not what a stock cache answers."""
    (prompt,) = prompts(500, seed=8)
    (expected,) = tiny_model.oracle([prompt])
    ids = torch.tensor([prompt])
    assert tiny.greedy(tiny_model.model, ids, 24)[0, 500:].tolist() != expected
    return prompt, expected


@pytest.fixture
def client(server):
    base = f"http://127.0.0.1:{server.port}/v1"
    return openai.OpenAI(base_url=base, api_key="none", timeout=120, max_retries=0)


def test_completions_with_logprobs(client, canary):
    prompt, expected = canary
    made = client.completions.create(
        prompt=prompt, max_tokens=24, logprobs=3, extra_body=EXTRA, **GREEDY
    ).choices[0]
    assert made.token_ids == expected
    assert len(made.logprobs.token_logprobs) == 24
    for chosen, best in zip(made.logprobs.token_logprobs, made.logprobs.top_logprobs, strict=True):
        assert chosen == max(best.values()) <= 0


def test_chat(client):
    text = tiny.text(400)
    messages = [{"role": "user", "content": text}]
    asked = {"messages": messages, "max_tokens": 24, "extra_body": {"ignore_eos": True}} | GREEDY
    whole = client.chat.completions.create(logprobs=True, top_logprobs=2, **asked).choices[0]
    assert len(whole.logprobs.content) == 24
    parts = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(stream=True, **asked)
        if chunk.choices
    ]
    assert len(parts) > 5
    assert "".join(parts) == whole.message.content
    same = client.completions.create(
        prompt=text + "\n", max_tokens=24, extra_body=EXTRA, **GREEDY
    ).choices[0]
    assert same.text == whole.message.content


def test_random_requests(server, canary):
    """Lengths of 1 to 1,500 tokens, 32 clients, shared prefixes, one in eight given up in
    mid-stream, steps overlapped; the canary in between gets the same answer as before and after."""
    chooser = random.Random(11)
    shared = prompts(400, 800, 1300, seed=12)
    jobs = [_job(chooser, shared, number, canary) for number in range(REQUESTS)]
    before, between, after, aborted = asyncio.run(_ask_all(server.port, jobs, canary))
    assert [before, *between, after] == [canary[1]] * (len(between) + 2)
    assert len(between) == REQUESTS // 25
    assert aborted > REQUESTS // 16
    assert server.metric("cached_tokens_total") > 0
    assert not server.arguments()["disable_overlap_schedule"]
    assert idle(server) == [0, 0, 0]


def idle(server):
    """Tokens in use and requests under way, once aborts have been heard of."""
    names = ("num_used_tokens", "num_running_reqs", "num_queue_reqs")
    for _ in range(60):
        values = [server.metric(name) for name in names]
        if not any(values):
            break
        time.sleep(1)
    return values


def _job(chooser, shared, number, canary):
    """A prompt, how many tokens to ask for, and after how many to give up."""
    if number % 25 == 13:
        return canary[0], 24, None
    short = chooser.random() < 0.8
    length = int(1500 ** chooser.random()) if short else chooser.randint(1, 1500)
    (prompt,) = prompts(length, seed=5000 + number)
    if chooser.random() < 0.3:
        whole = chooser.choice(shared)
        prompt = (whole[: chooser.randint(1, len(whole))] + prompt)[:1500]
    return prompt, chooser.randint(1, 40), 3 if chooser.random() < 0.125 else None


async def _ask_all(port, jobs, canary):
    base = f"http://127.0.0.1:{port}/v1"
    client = openai.AsyncOpenAI(base_url=base, api_key="none", timeout=300, max_retries=0)
    room, aborted = asyncio.Semaphore(CLIENTS), 0

    async def ask(prompt, new, give_up):
        nonlocal aborted
        async with room:
            asked = {"prompt": prompt, "max_tokens": new, "extra_body": EXTRA} | GREEDY
            if give_up is None:
                answer = await client.completions.create(**asked)
                assert len(answer.choices[0].token_ids) == new
                return answer.choices[0].token_ids
            stream = await client.completions.create(stream=True, **asked)
            seen = 0
            async for _ in stream:
                seen += 1
                if seen == give_up:
                    aborted += 1
                    break
            await stream.close()
            return None

    async with client:
        before = await ask(canary[0], 24, None)
        answers = await asyncio.gather(*(ask(*job) for job in jobs))
        after = await ask(canary[0], 24, None)
    between = [made for made, job in zip(answers, jobs, strict=True) if job[0] is canary[0]]
    return before, between, after, aborted
