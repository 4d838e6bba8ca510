"""Runs the official OpenAI client against a served model. Usage: openai_client.py BASE_URL MODEL"""

import sys
import time

import openai

base_url, model = sys.argv[1:]
client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)
question = [{"role": "user", "content": "What is gravity?"}]


def models():
    assert model in [m.id for m in client.models.list()], "the served model is listed"


def chat():
    answer = client.chat.completions.create(model=model, messages=question, max_tokens=16, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    return answer


def stream(whole):
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=question,
            max_completion_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content, (text, whole)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0, "the prompt was cached by the first call"
    finished = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert finished == [whole.choices[0].finish_reason]


def several():
    answer = client.chat.completions.create(model=model, messages=question, max_tokens=12, n=2, seed=7, temperature=1.0)
    again = client.chat.completions.create(model=model, messages=question, max_tokens=12, n=2, seed=7, temperature=1.0)
    texts = [c.message.content for c in answer.choices]
    assert [c.index for c in answer.choices] == [0, 1]
    assert texts[0] != texts[1], "two samples differ"
    assert texts == [c.message.content for c in again.choices], "a seed repeats them"


def stop():
    whole = client.completions.create(model=model, prompt="The capital of France is", max_tokens=12, temperature=0)
    text = whole.choices[0].text
    word = text.split()[1] if len(text.split()) > 1 else text[2:4]
    cut = client.completions.create(
        model=model, prompt="The capital of France is", max_tokens=12, temperature=0, stop=[word]
    )
    assert cut.choices[0].text == text[: text.index(word)], (cut.choices[0].text, text, word)
    assert cut.choices[0].finish_reason == "stop"
    parts = client.completions.create(
        model=model, prompt="The capital of France is", max_tokens=12, temperature=0, stop=word, stream=True
    )
    assert "".join(p.choices[0].text for p in parts if p.choices) == cut.choices[0].text


def logprobs():
    answer = client.chat.completions.create(
        model=model, messages=question, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= 0 and abs(entry.logprob - entry.top_logprobs[0].logprob) < 1e-6, "greedy takes the likeliest"
        assert bytes(entry.bytes).decode(errors="replace") == entry.token or "\ufffd" in entry.token
    completion = client.completions.create(model=model, prompt="Hello", max_tokens=3, temperature=0, logprobs=2)
    assert len(completion.choices[0].logprobs.tokens) == 3
    assert len(completion.choices[0].logprobs.top_logprobs[0]) == 2


def errors():
    for change, kind in [
        ({"model": "no-such-model"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"n": 0}, openai.BadRequestError),
        ({"messages": []}, openai.BadRequestError),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError),
    ]:
        request = {"model": model, "messages": question, "max_tokens": 4, **change}
        try:
            client.chat.completions.create(**request)
        except kind as error:
            assert error.body["message"], error
        else:
            raise AssertionError(f"{change} was accepted")


def extras():
    answer = client.completions.create(
        model=model,
        prompt=[504, 3575, 282, 4649, 314],
        max_tokens=6,
        extra_body={"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 6, "return_token_ids": True},
    )
    assert len(answer.choices[0].token_ids) == 6, answer


def fragments():
    """Tokens that are parts of characters: named by their bytes, and placed alike with and without streaming."""
    request = {"model": model, "prompt": "\U0001f600\U0001f600\U0001f600\U0001f600", "max_tokens": 8, "temperature": 0, "logprobs": 3}
    whole = client.completions.create(**request).choices[0].logprobs
    for token, logprob, top in zip(whole.tokens, whole.token_logprobs, whole.top_logprobs):
        assert len(top) == 3 and top[token] == logprob, (token, logprob, top)
    parts = [p.choices[0].logprobs for p in client.completions.create(**request, stream=True) if p.choices]
    assert [o for p in parts if p for o in p.text_offset] == whole.text_offset, whole.text_offset


def late_stop():
    answer = client.completions.create(
        model=model, prompt="The capital of France is", max_tokens=20, temperature=0, stop=["Paris"], extra_body={"min_tokens": 10}
    )
    assert answer.usage.completion_tokens >= 10, answer


def huge():
    started = time.monotonic()
    try:
        client.completions.create(model=model, prompt="a" * 7_900_000, max_tokens=1)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded", error
    else:
        raise AssertionError("a prompt of 7.9 MB was accepted")
    assert time.monotonic() - started < 5, "it is refused without being tokenized"


models()
stream(chat())
several()
stop()
logprobs()
errors()
extras()
fragments()
late_stop()
huge()
print("openai client: chat, stream, n, stop, logprobs, usage, errors and extras hold")
