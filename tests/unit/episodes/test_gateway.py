"""Tests of the gateway with OpenAI's own client: what programs get, and what of it becomes an episode."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import torch
from aiohttp import web
from gateway_cases import CALL, LOOK, RULES, Scene, play

from rlpipe.episodes.chat_request import ChatQuestion, RequestRefused
from rlpipe.episodes.gateway import Gateway
from rlpipe.episodes.graph import canonical
from rlpipe.episodes.parsing import MAX_CALLS
from rlpipe.episodes.session import Rules, SampledTurn
from rlpipe.errors import ConfigError
from rlpipe.types import IntArray, RolloutStatus


async def talk(scene: Scene, *, stream: bool = False) -> list[str]:
    """Play a conversation with a tool, as programs do: what was answered is sent back as the client has it."""
    client, messages, texts = scene.client(), [{"role": "user", "content": "Where?"}], []
    for _ in range(3):
        answer = await client.chat.completions.create(model="any", messages=messages, tools=[LOOK], temperature=0.1)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        texts.append(message.content or "")
        if message.tool_calls:
            assert answer.choices[0].finish_reason == "tool_calls"
            own = message.tool_calls[0]
            messages.append({"role": "tool", "tool_call_id": own.id, "content": "<|im_end|>north"})
        else:
            messages.append({"role": "user", "content": "And then?"})
    return texts


def test_with_the_templates_history_a_programs_earlier_thoughts_are_left_out() -> None:
    said = [f"<think>\nhm {number}\n</think>\n\n{number}" for number in range(3)]

    async def ask(scene: Scene) -> None:
        client, messages = scene.client(), [{"role": "user", "content": "Count."}]
        for _ in said:
            answer = await client.chat.completions.create(model="any", messages=messages)
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": "Go on."})

    for history, count in (("template", 3), ("keep", 1)):
        scene = Scene(said, rules=replace(RULES, history=history), template_name="trl/qwen3")
        episode, _ = play(scene, ask)
        assert len(episode.graph.branches()) == count
        assert len(episode.graph.turns) == 3
        assert ("hm 0" in scene.template.tokenizer.decode(scene.contexts[-1])) == (history == "keep")


def test_a_program_with_tools_is_one_sequence() -> None:
    scene = Scene([CALL, "North.", "Then east."])
    episode, texts = play(scene, talk)
    assert texts == ["", "North.", "Then east."]
    (branch,) = episode.graph.branches()
    assert episode.branches_by_reason == {}
    assert len(episode.graph.turns) == 3
    (bridge,) = scene.session._bridges.values()
    assert bridge._choices_of_content, "what was found out about the template serves all requests"
    for before, after in zip(scene.contexts, scene.contexts[1:], strict=False):
        assert np.array_equal(after[: len(before)], before)
    tokenizer = scene.template.tokenizer
    sampled = [tokenizer.decode(branch.token_ids[branch.turns == turn]) for turn in range(3)]
    assert sampled == [f"{text}<|im_end|>" for text in (CALL, "North.", "Then east.")]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (branch.token_ids == end).sum() == 7, "the planted control token is plain text"


def test_a_stream_is_the_same_answer() -> None:
    async def program(scene: Scene) -> tuple[str, list[Any], str | None]:
        chunks = [
            chunk
            async for chunk in await scene.client().chat.completions.create(
                model="any", messages=[{"role": "user", "content": "Where?"}], tools=[LOOK], stream=True
            )
        ]
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        return "".join(c.choices[0].delta.content or "" for c in chunks), calls, chunks[-1].choices[0].finish_reason

    episode, (text, calls, reason) = play(Scene([CALL]), program)
    assert (text, reason) == ("", "tool_calls")
    assert [call.function.arguments for call in calls] == ['{"at": "home"}']
    assert len(episode.graph.turns) == 1


def test_a_rewritten_history_is_a_branch_of_its_own() -> None:
    async def program(scene: Scene) -> None:
        client = scene.client()
        asked = [{"role": "user", "content": "Where?"}]
        await client.chat.completions.create(model="any", messages=asked)
        parts = [{"type": "text", "text": "South"}, {"type": "text", "text": "."}]
        rewritten = [*asked, {"role": "assistant", "content": parts}, {"role": "user", "content": parts[:1]}]
        await client.chat.completions.create(model="any", messages=rewritten)

    episode, _ = play(Scene(["North.", "East."]), program)
    assert episode.branches_by_reason == {"rewritten": 1}
    assert [message["content"] for message in episode.messages] == ["South.", "South", "East."]
    assert [int(branch.loss_mask.sum()) for branch in episode.graph.branches()] == [
        len(node.token_ids) for node in episode.graph.turns
    ]


@pytest.mark.parametrize(
    ("said", "options"),
    [("North. Observation: none", {"stop": ["Observation:"]}), (CALL * (MAX_CALLS + 4), {"tools": [LOOK]})],
)
def test_tokens_of_an_answer_that_was_cut_off_are_no_history(said: str, options: dict[str, Any]) -> None:
    async def program(scene: Scene) -> None:
        made, messages = scene.client().chat.completions.create, [{"role": "user", "content": "Where?"}]
        for _ in range(3):
            answer = await made(model="any", messages=messages, **options)
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            calls = messages[-1].get("tool_calls", [])
            messages += [{"role": "tool", "tool_call_id": own["id"], "content": "so"} for own in calls]
            messages += [] if calls else [{"role": "user", "content": "And then?"}]

    scene = Scene([said, "East.", "South."])
    episode, _ = play(scene, program)
    assert episode.branches_by_reason == {"rewritten": 1}
    assert [sorted({*branch.turns.tolist()} - {-1}) for branch in episode.graph.branches()] == [[0], [1, 2]]
    text = scene.template.tokenizer.decode(scene.contexts[2])
    assert "Observation" not in text
    assert text.count("home") in (0, MAX_CALLS)


def test_limits_may_shrink_and_stops_count_and_sampling_is_the_runs() -> None:
    async def program(scene: Scene) -> list[str | None]:
        client = scene.client()
        texts = []
        for limit in (7, 700):
            answer = await client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": f"{limit}?"}], max_tokens=limit, stop=["th"]
            )
            texts.append(answer.choices[0].message.content)
        return texts

    scene = Scene(["North.", "East."])
    _, texts = play(scene, program)
    assert scene.limits == [7, 100]
    assert [*scene.stops] == [["th"], ["th"]]
    assert texts == ["Nor", "East."]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"n": 2}, "n=2 is not supported"),
        ({"functions": [{"name": "look"}]}, "functions=.* is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format={'type': 'json_object'} is not supported"),
        ({"extra_body": {"guided_json": {"type": "object"}}}, "guided_json={'type': 'object'} is not supported"),
        ({"extra_body": {"continue_final_message": True}}, "continue_final_message=True is not supported"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "'messages' is set for each row already"),
        ({"stream": True, "extra_body": {"stream_options": True}}, "stream_options must be an object"),
        ({"tools": [{"type": "web_search"}]}, "the tool 'web_search' is none of the program's functions"),
        ({"tools": [{"type": "function", "name": "look"}]}, "a tool must have an object 'function' with a 'name'"),
        ({"tools": [LOOK], "tool_choice": LOOK}, "tool_choice={'type': 'function', .* is not supported"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "text parts"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "the role 'nobody'"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(more: dict[str, Any], words: str) -> None:
    async def program(scene: Scene) -> None:
        body = {"model": "any", "messages": [{"role": "user", "content": "x"}], **more}
        with pytest.raises(openai.BadRequestError, match=words):
            await scene.client().chat.completions.create(**body)

    episode, _ = play(Scene([]), program)
    assert not episode.graph.nodes


def test_options_that_ask_for_nothing_more_are_taken() -> None:
    async def program(scene: Scene) -> list[int]:
        client, counts = scene.client(), []
        for choice in ("auto", "required", "none"):
            answer = await client.chat.completions.create(
                model="any",
                messages=[{"role": "user", "content": f"{choice}?"}],
                tools=[LOOK],
                tool_choice=choice,
                response_format={"type": "text"},
            )
            counts.append(len(answer.choices[0].message.tool_calls or ()))
        return counts

    scene = Scene([CALL] * 3)
    _, counts = play(scene, program)
    assert counts == [1, 1, 0]
    texts = [scene.template.tokenizer.decode(context) for context in scene.contexts]
    assert ['"name": "look"' in text for text in texts] == [True, True, False], "none hides the tools"


@pytest.mark.parametrize(
    ("name", "said", "stop", "content"),
    [
        ("trl/qwen3", "<think>\nFirst.\n\nThen <tool_call>", "\n\n", ""),
        ("trl/qwen3_5_think", "The format is Action: x Observation: y", "Observation:", ""),
        ("trl/qwen3", "<think>\nhm\n</think>\n\nNorth. Observation: y", "Observation:", "North."),
        ("trl/qwen2_5", "North. Observation: y", "Observation:", "North."),
    ],
)
def test_a_stop_within_thoughts_leaves_no_answer(name: str, said: str, stop: str, content: str) -> None:
    async def program(scene: Scene) -> Any:
        messages: Any = [{"role": "user", "content": "Where?"}]
        answer = await scene.client().chat.completions.create(model="any", messages=messages, tools=[LOOK], stop=[stop])
        return answer.choices[0]

    _, choice = play(Scene([said], template_name=name), program)
    assert (choice.message.content.strip(), choice.message.tool_calls) == (content, None)
    assert choice.finish_reason == "stop"


def test_a_conversation_may_end_with_the_assistants_message() -> None:
    async def program(scene: Scene) -> str | None:
        messages: Any = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "I look."}]
        answer = await scene.client().chat.completions.create(model="any", messages=messages)
        return answer.choices[0].message.content

    scene = Scene(["North."])
    episode, text = play(scene, program)
    assert text == "North."
    assert scene.template.tokenizer.decode(scene.contexts[0]).endswith("I look.<|im_end|>\n<|im_start|>assistant\n")
    assert len(episode.graph.turns) == 1


@pytest.mark.parametrize("name", ["trl/qwen2_5", "trl/llama3_1", "trl/gptoss", "trl/deepseekv3"])
def test_empty_fields_of_a_clients_own_messages_say_nothing(name: str) -> None:
    async def program(scene: Scene) -> None:
        client = scene.client()
        empty = {"tool_calls": None, "function_call": None, "refusal": None, "audio": None, "annotations": None}
        for more in ({}, empty, {"tool_calls": []}):
            answer = {"role": "assistant", "content": "North.", **more}
            messages: Any = [{"role": "user", "content": "Where?"}, answer, {"role": "user", "content": "And then?"}]
            await client.chat.completions.create(model="any", messages=messages)

    scene = Scene(["East."] * 3, template_name=name)
    play(scene, program)
    texts = {scene.template.tokenizer.decode(context) for context in scene.contexts}
    assert len(texts) == 1
    assert "North." in texts.pop()


def test_a_history_may_have_refusals_and_calls_without_arguments() -> None:
    async def program(scene: Scene) -> None:
        client = scene.client()
        refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I can't say."}]}
        called = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "look"}}]}
        result = {"role": "tool", "tool_call_id": "a", "content": "dark"}
        asked = [{"role": "user", "content": "Where?"}, refused, {"role": "user", "content": "Look."}, called, result]
        messages: Any = asked
        await client.chat.completions.create(model="any", messages=messages)

    scene = Scene(["East."])
    play(scene, program)
    context = scene.template.tokenizer.decode(scene.contexts[0])
    assert "I can't say." in context
    assert '{"name": "look", "arguments": {}}' in context


def test_a_request_may_have_options_of_the_chat_template() -> None:
    async def program(scene: Scene) -> None:
        client, messages = scene.client(), [{"role": "user", "content": "Where?"}]
        for options in ({}, {"enable_thinking": False}, {"enable_thinking": None}):
            more: Any = {"messages": messages, "extra_body": {"chat_template_kwargs": options}}
            await client.chat.completions.create(model="any", **more)

    scene = Scene(["North."] * 3, template_name="trl/qwen3")
    play(scene, program)
    texts = [scene.template.tokenizer.decode(context) for context in scene.contexts]
    assert [text.endswith("<think>\n\n</think>\n\n") for text in texts] == [False, True, False]


def test_answers_that_nobody_has_received_are_no_turns() -> None:
    async def program(scene: Scene) -> None:
        for number in range(3):
            with pytest.raises(openai.APITimeoutError):
                await ask(scene, f"{number}?", timeout=0.1)
        await asyncio.sleep(0.4)
        for number in range(2):
            await ask(scene, f"Where, {number}?")
        with pytest.raises(openai.BadRequestError, match="the episode has had its 2 turns"):
            await ask(scene, "And?")

    async def ask(scene: Scene, text: str, **options: Any) -> None:
        messages: Any = [{"role": "user", "content": text}]
        await scene.client(**options).chat.completions.create(model="any", messages=messages)

    scene = Scene(["North."] * 9, pause_s=0.3, rules=replace(RULES, max_turns=2))
    episode, _ = play(scene, program)
    assert len(episode.graph.turns) == 2
    assert [message["content"] for message in episode.opening] == ["Where, 0?"], "the first one that was received"


def test_of_requests_at_the_same_time_as_many_are_answered_as_turns_are_left() -> None:
    async def program(scene: Scene) -> list[bool]:
        questions = [ChatQuestion.parse({"messages": [{"role": "user", "content": text}]}) for text in "xyz"]
        asked = (scene.session.ask(question, is_retry=False) for question in questions)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [isinstance(answer, RequestRefused) for answer in answers]

    _, refused = play(Scene(["North.", "East."], rules=replace(RULES, max_turns=2)), program)
    assert refused == [False, False, True]


def test_an_answer_that_was_given_up_is_no_turn_beyond_the_limit() -> None:
    async def program(scene: Scene) -> None:
        session, waits = scene.session, [True]
        first, second = (ChatQuestion.parse({"messages": [{"role": "user", "content": text}]}) for text in "xy")
        await session.ask(first, is_retry=False, listens=lambda: waits[0])
        waits[0] = False
        session.received(second, await session.ask(second, is_retry=False))
        with pytest.raises(RequestRefused, match="has had its 1 turns"):
            await session.ask(first, is_retry=False)

    play(Scene(["North.", "East."], rules=replace(RULES, max_turns=1)), program)


def test_a_number_may_come_back_in_another_form() -> None:
    assert (
        canonical('{"a": 6.0, "b": [1e5, 0.5]}')
        == canonical('{"b": [100000, 0.5], "a": 6}')
        == canonical({"a": 6.0, "b": [1e5, 0.5]})
    )
    assert canonical('{"a": 6.5}') != canonical('{"a": 6}')


def test_the_opening_is_that_of_the_first_conversation_that_is_left() -> None:
    async def program(scene: Scene) -> list[list[str]]:
        session, openings = scene.session, []
        for text in ("x", "y"):
            question = ChatQuestion.parse({"messages": [{"role": "user", "content": text}]})
            answer = await session.ask(question, is_retry=False)
            session.received(question, answer)
            if text == "x":
                session.lost(question, answer)
            openings.append([message["content"] for message in session.episode.opening])
        return openings

    _, openings = play(Scene(["North.", "East."]), program)
    assert openings == [[], ["y"]]


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/json; charset=foo"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
def test_bodies_in_unknown_encodings_are_refused(headers: dict[str, str]) -> None:
    async def program(scene: Scene) -> int:
        key = {"Authorization": f"bearer {scene.key}"}
        async with aiohttp.ClientSession(scene.gateway.base_url + "/", headers=key) as client:
            async with client.get("models/policy") as model:
                assert (await model.json())["id"] == "policy"
            async with client.post("chat/completions", data=b"{}", headers=headers) as response:
                return response.status

    assert play(Scene([]), program)[1] == 400


def test_the_key_may_be_in_a_header_of_its_own() -> None:
    body: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "Where?"}]}

    async def program(scene: Scene) -> str | None:
        client = scene.client(api_key="of a proxy", default_headers={"X-Rlpipe-Key": scene.key})
        answer = await client.chat.completions.create(**body)
        with pytest.raises(openai.AuthenticationError):
            await scene.client(api_key="of a proxy").chat.completions.create(**body)
        return answer.choices[0].message.content

    episode, said = play(Scene(["South."]), program)
    assert said == "South."
    assert len(episode.graph.turns) == 1


def test_keys_of_others_and_of_ended_episodes_reach_nothing() -> None:
    async def program(scene: Scene) -> None:
        body: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "x"}]}
        for key in ("", "rlpipe-other", scene.key[:-1]):
            with pytest.raises(openai.AuthenticationError):
                await scene.client().with_options(api_key=key or "none").chat.completions.create(**body)
        scene.gateway.close(scene.key)
        with pytest.raises(openai.ConflictError):
            await scene.client().chat.completions.create(**body)

    play(Scene(["x"]), program)


@pytest.mark.parametrize("num_rounds", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_thousand_retries_get_the_same_answer(num_rounds: int) -> None:
    async def program(scene: Scene) -> set[str | None]:
        client, body = scene.client(), {"model": "any", "messages": [{"role": "user", "content": "x"}]}
        header = {"x-stainless-retry-count": "1"}
        made = client.chat.completions.create
        first = asyncio.create_task(made(**body))  # type: ignore[call-overload]
        while not scene.contexts:
            await asyncio.sleep(0.01)
        answers = await asyncio.gather(first, *(made(**body, extra_headers=header) for _ in range(50)))  # type: ignore[call-overload]
        for _ in range(num_rounds - 1):
            answers += await asyncio.gather(*(made(**body, extra_headers=header) for _ in range(50)))  # type: ignore[call-overload]
        return {answer.id for answer in answers}

    scene = Scene(["North."] * 6, pause_s=0.5)
    episode, ids = play(scene, program)
    assert len(ids) == len(scene.contexts) == len(episode.graph.turns) == 1


def test_equal_questions_at_the_same_time_are_several_turns() -> None:
    async def program(scene: Scene) -> list[str | None]:
        body: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "x"}]}
        made = scene.client().chat.completions.create
        answers = await asyncio.gather(*(made(**body) for _ in range(3)))
        return [answer.choices[0].message.content for answer in answers]

    scene = Scene(["North.", "East.", "South."], pause_s=0.2)
    episode, texts = play(scene, program)
    assert sorted(filter(None, texts)) == ["East.", "North.", "South."]
    assert len(scene.contexts) == len(episode.graph.turns) == 3
    assert len(episode.graph.branches()) == 3


def test_a_client_that_gives_up_and_asks_again_gets_the_turn_that_was_sampled() -> None:
    async def program(scene: Scene) -> str | None:
        body: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "x"}]}
        with pytest.raises(openai.APITimeoutError):
            await scene.client(timeout=0.1).chat.completions.create(**body)
        await asyncio.sleep(0.4)
        assert not scene.session.episode.graph.turns, "what was not received is not trained"
        answer = await scene.client().chat.completions.create(**body)
        return answer.choices[0].message.content

    scene = Scene(["North.", "East."], pause_s=0.3)
    episode, text = play(scene, program)
    assert text == "North."
    assert len(scene.contexts) == len(episode.graph.turns) == 1


def test_an_answer_is_lost_only_if_none_of_its_requests_brings_it() -> None:
    async def program(scene: Scene) -> list[int]:
        session, question = scene.session, ChatQuestion.parse({"messages": [{"role": "user", "content": "x"}]})
        answer, again = await asyncio.gather(*(session.ask(question, is_retry=retry) for retry in (False, True)))
        assert answer is again
        counts = []
        for call in (session.received, session.received, session.lost, session.lost):
            call(question, answer)
            counts.append(len(session.episode.graph.turns))
        return counts

    _, counts = play(Scene(["North."]), program)
    assert counts == [1, 1, 1, 0]


def test_a_retry_among_equal_questions_gets_the_turn_that_was_given_up() -> None:
    async def program(scene: Scene) -> list[str | None]:
        body: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "x"}]}
        patient = asyncio.create_task(scene.client().chat.completions.create(**body))
        await asyncio.sleep(0.5)
        made = scene.client(timeout=1.0, max_retries=1).chat.completions.create  # the second one is its retry
        answers = [await made(**body), await patient]
        return [answer.choices[0].message.content for answer in answers]

    scene = Scene(["North.", "East."], pause_s=2.0)
    episode, texts = play(scene, program)
    assert texts == ["East.", "North."]
    assert len(scene.contexts) == len(episode.graph.turns) == 2


def test_a_question_that_failed_once_is_answered_when_it_is_asked_again() -> None:
    class Failing(Scene):
        async def sample(
            self, token_ids: IntArray, *, max_tokens: int, turn: int, stop: Sequence[str] = ()
        ) -> SampledTurn:
            if not turn:
                raise ValueError("an odd text")
            return await super().sample(token_ids, max_tokens=max_tokens, turn=turn, stop=stop)

    async def program(scene: Scene) -> str | None:
        body: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "x"}]}
        answer = await scene.client(max_retries=2).chat.completions.create(**body)
        return answer.choices[0].message.content

    rules = replace(RULES, max_turns=1)  # what was not sampled is no turn
    episode, text = play(Failing(["North.", "East."], rules=rules), program)
    assert text == "East."
    assert len(episode.graph.turns) == 1


def test_a_retry_of_one_of_equal_questions_does_not_get_the_answer_of_another() -> None:
    class Failing(Scene):
        async def sample(
            self, token_ids: IntArray, *, max_tokens: int, turn: int, stop: Sequence[str] = ()
        ) -> SampledTurn:
            if not turn:
                await asyncio.sleep(0.2)
                raise ValueError("an odd text")
            return await super().sample(token_ids, max_tokens=max_tokens, turn=turn, stop=stop)

    async def program(scene: Scene) -> set[str | None]:
        body: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "x"}]}
        made = scene.client(max_retries=1).chat.completions.create
        answers = await asyncio.gather(*(made(**body) for _ in range(2)))
        return {answer.choices[0].message.content for answer in answers}

    episode, texts = play(Failing(["North.", "East.", "South."]), program)
    assert texts == {"East.", "South."}
    assert len(episode.graph.turns) == 2


def test_requests_are_not_kept_once_they_are_answered_or_refused() -> None:
    async def program(scene: Scene) -> tuple[int, int]:
        client = scene.client()
        for number in range(8):
            with suppress(openai.BadRequestError):
                await client.chat.completions.create(model="any", messages=[{"role": "user", "content": f"{number}"}])
        gc.collect()
        return len(scene.session._asked), sum(isinstance(found, web.Request) for found in gc.get_objects())

    _, (num_asked, num_requests) = play(Scene(["x"] * 6), program)
    assert num_asked == 6
    assert num_requests <= 1


def test_a_retry_of_a_question_that_was_answered_before_is_a_turn_of_its_own() -> None:
    class Failing(Scene):
        async def sample(
            self, token_ids: IntArray, *, max_tokens: int, turn: int, stop: Sequence[str] = ()
        ) -> SampledTurn:
            if turn == 1:
                raise ValueError("an odd text")
            return await super().sample(token_ids, max_tokens=max_tokens, turn=turn, stop=stop)

    async def program(scene: Scene) -> list[str | None]:
        body: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "x"}]}
        made = scene.client(max_retries=1).chat.completions.create
        return [(await made(**body)).choices[0].message.content for _ in range(2)]

    episode, texts = play(Failing(["North.", "East.", "South."]), program)
    assert texts == ["North.", "South."]
    assert len(episode.graph.turns) == 2


def test_an_answer_that_fills_the_context_truncates_the_episode_unless_the_program_makes_room() -> None:
    class Full(Scene):
        async def sample(
            self, token_ids: IntArray, *, max_tokens: int, turn: int, stop: Sequence[str] = ()
        ) -> SampledTurn:
            found = await super().sample(token_ids, max_tokens=max_tokens, turn=turn, stop=stop)
            if turn:
                return found
            few = {
                name: [getattr(found, name)[0]] * max_tokens for name in ("token_ids", "logprobs", "policy_versions")
            }
            return SampledTurn(**few, finish_reason="length")

    async def program(scene: Scene, count: int = 1) -> None:
        made = scene.client().chat.completions.create
        for text in ["word " * 580, "word"][:count]:
            await made(model="any", messages=[{"role": "user", "content": text}])

    rules = replace(RULES, max_tokens=3000)
    episode, _ = play(Full(["x", "y"], rules=rules), program)
    assert (episode.status, episode.end) == (RolloutStatus.TRUNCATED, "length")
    episode, _ = play(Full(["x", "y"], rules=rules), partial(program, count=2))
    assert (episode.status, episode.end) == (RolloutStatus.COMPLETED, "done")


def test_conversations_are_counted_once_they_are_received() -> None:
    async def program(scene: Scene) -> None:
        session = scene.session
        questions = [ChatQuestion.parse({"messages": [{"role": "user", "content": text}]}) for text in "aabc"]
        answers = await asyncio.gather(*(session.ask(own, is_retry=False) for own in questions))
        for question, answer in zip(questions[:3], answers, strict=False):
            session.received(question, answer)
        assert session.episode.branches_by_reason == {"compacted": 1, "subagent": 1}
        session.lost(questions[2], answers[2])
        assert session.episode.branches_by_reason == {"compacted": 1}
        for question, answer in zip(questions[2:], answers[2:], strict=True):
            session.received(question, answer)

    episode, _ = play(Scene(["x"] * 4), program)
    assert episode.branches_by_reason == {"compacted": 1, "subagent": 2}


def test_half_a_character_is_a_text() -> None:
    async def program(scene: Scene) -> int:
        headers = {"Authorization": f"Bearer {scene.key}"}
        body = {"messages": [{"role": "user", "content": "go \ud83d", "name": "\ud83d"}]}
        url = f"{scene.gateway.base_url}/chat/completions"
        async with aiohttp.ClientSession(headers=headers) as http, http.post(url, json=body) as response:
            return response.status

    scene = Scene(["x"])
    assert play(scene, program)[1] == 200
    assert r"go \ud83d" in scene.template.tokenizer.decode(scene.contexts[0])


def test_the_end_of_an_episode_refuses_open_requests() -> None:
    async def program(scene: Scene) -> None:
        asked = asyncio.create_task(
            scene.client().chat.completions.create(model="any", messages=[{"role": "user", "content": "x"}])
        )
        await asyncio.sleep(0.2)
        scene.session.seal()
        with pytest.raises(openai.ConflictError):
            await asked

    episode, _ = play(Scene(["x"], pause_s=30), program)
    assert not episode.graph.turns


def test_turns_and_the_context_may_run_out() -> None:
    async def program(scene: Scene) -> None:
        client = scene.client()
        for number in range(scene.rules.max_turns):
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": f"{number}"}])
        with pytest.raises(openai.BadRequestError, match="has had its 2 turns"):
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "more"}])

    episode, _ = play(Scene(["x"] * 3, rules=Rules(**{**RULES_AS_DICT, "max_turns": 2})), program)
    assert episode.end == "max_turns"

    async def long(scene: Scene) -> None:
        with pytest.raises(openai.BadRequestError, match="maximum context length is 3000 tokens"):
            await scene.client().chat.completions.create(
                model="any", messages=[{"role": "user", "content": "word " * 4000}]
            )

    assert play(Scene(["x"]), long)[0].end == "length"

    async def shortened(scene: Scene) -> None:
        await long(scene)
        await scene.client().chat.completions.create(model="any", messages=[{"role": "user", "content": "word"}])

    episode, _ = play(Scene(["x"]), shortened)
    assert (episode.status, episode.end) == (RolloutStatus.COMPLETED, "done"), "it made room, and went on"


def test_a_program_that_a_limit_ends_has_not_failed_although_its_other_conversation_continues() -> None:
    async def program(scene: Scene) -> None:
        client = scene.client()
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "word " * 4000}])
        await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "word"}])
        assert [*scene.session.limits_met.values()] == ["length"]

    assert play(Scene(["x"]), program)[0].end == "done"


RULES_AS_DICT = {name: getattr(RULES, name) for name in RULES.__dataclass_fields__}


def test_rewards_belong_to_answers_or_to_the_episode() -> None:
    async def program(scene: Scene) -> None:
        client = scene.client()
        ids = []
        for text in ("a", "b"):
            answer = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": text}])
            ids.append(answer.id)
        headers = {"Authorization": f"Bearer {scene.key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            for reward, status in (
                ({ids[0]: 0.5, ids[1]: 2}, 200),
                ({"other": 1}, 400),
                ("x", 400),
                (None, 400),
                (float("nan"), 400),
                (10**400, 400),
            ):
                async with http.post(f"{scene.gateway.base_url}/reward", json={"reward": reward}) as response:
                    assert response.status == status

    episode, _ = play(Scene(["x", "y"]), program)
    assert episode.turn_rewards == [0.5, 2.0]


@pytest.mark.parametrize("reward", [True, np.float32(1), np.bool_(True), torch.tensor(1.0)])
def test_a_reward_may_be_any_kind_of_number(reward: Any) -> None:
    async def program(scene: Scene) -> None:
        await scene.client().chat.completions.create(model="any", messages=[{"role": "user", "content": "a"}])
        scene.session.set_reward(reward)

    episode, _ = play(Scene(["x"]), program)
    assert episode.turn_rewards == [1.0]


@pytest.mark.parametrize("reward", [np.ones(2), torch.ones(1), "1", None, 10**400])
def test_a_reward_is_nothing_else(reward: Any) -> None:
    async def program(scene: Scene) -> None:
        with pytest.raises(RequestRefused, match="is not a finite number"):
            scene.session.set_reward(reward)

    play(Scene([]), program)


def test_rewards_of_no_answer_at_all_are_0() -> None:
    async def program(scene: Scene) -> None:
        await scene.client().chat.completions.create(model="any", messages=[{"role": "user", "content": "a"}])
        scene.session.set_reward({})

    episode, _ = play(Scene(["x"]), program)
    assert episode.turn_rewards == [0.0]
    assert episode.is_rewarded


def test_calls_beyond_the_most_of_a_turn_are_left_out_of_the_answer() -> None:
    async def program(scene: Scene) -> int:
        made = scene.client().chat.completions.create
        asked: Any = [{"role": "user", "content": "a"}]
        answer = await made(model="any", messages=asked, tools=[LOOK])  # type: ignore[list-item]
        return len(answer.choices[0].message.tool_calls or ())

    episode, num_calls = play(Scene([CALL * (MAX_CALLS + 4)]), program)
    assert num_calls == MAX_CALLS
    assert episode.invalid_calls


def test_bodies_that_are_no_requests_are_refused() -> None:
    async def program(scene: Scene) -> list[int]:
        headers = {"Authorization": f"Bearer {scene.key}", "Content-Type": "application/json"}
        url, statuses = f"{scene.gateway.base_url}/chat/completions", []
        async with aiohttp.ClientSession(headers=headers) as http:
            for body in (b"", b"{", b"[1]", b"[" * 100_000, b'{"messages": [1]}', b'{"messages": "x"}', b"\xff"):
                with suppress(aiohttp.ClientError):
                    async with http.post(url, data=body) as response:
                        statuses.append(response.status)
        return statuses

    assert play(Scene([]), program)[1] == [400] * 7


def test_a_body_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpipe.episodes.gateway.MAX_BODY_BYTES", 10_000)

    async def program(scene: Scene) -> None:
        made = scene.client().chat.completions.create
        with pytest.raises(openai.APIStatusError, match="413"):
            await made(model="any", messages=[{"role": "user", "content": "x" * 20_000}])
        await made(model="any", messages=[{"role": "user", "content": "x" * 2_000}])

    play(Scene(["yes"]), program)


def test_an_address_that_another_process_has_is_waited_for_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpipe.episodes.gateway.ADDRESS_WAIT_S", 0.5)

    async def run() -> None:
        first = Gateway()
        await first.start()
        port = int(first.base_url.split(":")[-1].removesuffix("/v1"))
        second = Gateway(port=port)
        with pytest.raises(ConfigError, match=f"environment.port={port}: agents can't be served there: .* in use"):
            await second.start()
        await second.stop()
        third = Gateway(port=port)
        starting = asyncio.create_task(third.start())
        await asyncio.sleep(0.1)
        await first.stop()
        await starting
        assert third.base_url == first.base_url
        await third.stop()
        with pytest.raises(ConfigError, match=r"environment\.host=203\.0\.113\.1"):
            await Gateway("203.0.113.1").start()

    asyncio.run(run())
