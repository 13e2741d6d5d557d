"""The demo model: the files in the repository, and the script that made them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from ellm_sgl.eval import demo_corpus, train_demo_model
from ellm_sgl.eval.demo_corpus import Document, encode

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "ellm_sgl" / "demo_model"
TINY = {"hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 64}
QUESTIONS = ("What does str.join do?", "Explain exceptions in Python.", "What is the json module?")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_demo_model.load_transformers().AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    return train_demo_model.load_transformers().AutoModelForCausalLM.from_pretrained(FOLDER).eval()


@pytest.fixture(scope="module")
def small_corpus() -> list[Document]:
    question, reply = (
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "It is a test. " * 9},
    )
    return [Document(f"source {i}", (question, reply)) for i in range(400)]


def english_share(text: str) -> float:
    """The share of the words of three letters or more that the topics of pydoc know too."""
    known = set(re.findall(r"[a-z]{3,}", " ".join(topics.values()).lower()))
    words = re.findall(r"[a-z]{3,}", text.lower())
    return sum(word in known for word in words) / max(1, len(words))


def sample(model: Any, tokenizer: Any, questions: tuple[str, ...]) -> str:
    """200 bytes of answer to each question at temperature 0.7."""
    texts = []
    for question in questions:
        torch.manual_seed(0)
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(
            **prompt,
            do_sample=True,
            temperature=0.7,
            top_k=0,
            min_new_tokens=200,
            max_new_tokens=200,
        )
        texts.append(
            tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    return "\n".join(texts)


def test_folder_is_small() -> None:
    files = {file.name: file.stat().st_size for file in FOLDER.iterdir()}
    assert sum(files.values()) <= 8 * 2**20
    assert {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    } <= set(files)


def test_token_ids_are_the_utf8_bytes(tokenizer: Any) -> None:
    text = (
        "".join(map(chr, [*range(0x800), 0x3042, 0xFFFD, 0x1F600, 0x10FFFF]))
        + " a  b\r\n\t <|nothing|> "
    )
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(set(tokenizer.convert_ids_to_tokens(list(range(256))))) == 256
    assert tokenizer.convert_tokens_to_ids(list(train_demo_model.SPECIALS)) == [
        256,
        257,
        258,
        259,
        260,
    ]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (
        256,
        257,
        None,
    )


def test_chat_template_gives_the_training_format(tokenizer: Any) -> None:
    chat = [
        {"role": role, "content": f" {role} "}
        for role in ("system", "user", "assistant", "user", "assistant")
    ]
    shown = tokenizer.apply_chat_template(chat, tokenize=False)
    assert (
        shown
        == "<|system|>\n system \n" + "<|user|>\n user \n<|assistant|>\n assistant <|end|>" * 2
    )
    assert tokenizer.encode(shown) == encode(Document("chat", tuple(chat)))
    asked = tokenizer.apply_chat_template(chat[:2], tokenize=False, add_generation_prompt=True)
    assert shown.startswith(asked) and asked.endswith("<|assistant|>\n")


def test_model_is_served_in_float32_with_grouped_heads(model: Any) -> None:
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 256
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (6, 2)


def test_model_writes_english_and_random_weights_do_not(model: Any, tokenizer: Any) -> None:
    assert english_share(sample(model, tokenizer, QUESTIONS)) >= 0.7
    assert (
        english_share(sample(train_demo_model.make_model(0, {}).eval(), tokenizer, QUESTIONS[:1]))
        < 0.4
    )


def test_model_stays_sane_past_its_training_length(model: Any) -> None:
    text = re.sub(
        r"\s+", " ", topics["assignment"] + topics["exceptions"] + topics["naming"]
    ).encode()[:3072]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(text)])).logits[0, :-1]
    nats = torch.nn.functional.cross_entropy(logits, torch.tensor(list(text[1:])), reduction="none")
    assert nats[2100:].mean() < 1.5 * nats[100:2048].mean()


def test_training_is_repeatable_and_the_saved_model_is_the_measured_one(
    small_corpus: list[Document], tmp_path: Path
) -> None:
    runs = [
        train_demo_model.train(small_corpus, steps=3, batch_tokens=512, size=TINY, sample_tokens=16)
        for _ in range(2)
    ]
    (model, report), (again, report_again) = runs
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )
    assert (
        report.samples == report_again.samples
        and report.steps == 3
        and report.heldout_bits_per_byte > 0
    )
    train_demo_model.save(model, train_demo_model.make_tokenizer(), tmp_path / "out", [report])
    assert not list(tmp_path.glob(".*")), "nothing is left beside the folder"
    assert (tmp_path / "out/LICENSE").read_text() == (FOLDER / "LICENSE").read_text()
    loaded = (
        train_demo_model.load_transformers()
        .AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        .eval()
    )
    ids = torch.arange(264)[None]
    assert loaded.dtype == torch.float32
    torch.testing.assert_close(
        loaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-5, atol=1e-5
    )


def test_a_few_steps_lower_the_loss(small_corpus: list[Document]) -> None:
    _, first = train_demo_model.train(
        small_corpus, steps=1, batch_tokens=512, size=TINY, sample_tokens=16
    )
    _, later = train_demo_model.train(
        small_corpus, steps=30, batch_tokens=512, size=TINY, sample_tokens=16
    )
    assert later.heldout_bits_per_byte < 0.7 * first.heldout_bits_per_byte


def test_orthogonalise_brings_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 32, 96), (3, 96, 32)):
        values = torch.linalg.svdvals(train_demo_model.orthogonalise(torch.randn(shape)))
        assert values.min() > 0.5 and values.max() < 1.3


def test_corpus_is_ascii_prose_mostly_in_chats() -> None:
    documents = demo_corpus.gather()
    sizes = {
        is_chat: sum(len(encode(d)) for d in documents if bool(d.messages) == is_chat)
        for is_chat in (True, False)
    }
    assert sizes[True] > 1_000_000 and sizes[True] > 3 * sizes[False]
    held_out = sum(len(encode(d)) for d in documents if d.held_out)
    assert 0.01 < held_out / sum(sizes.values()) < 0.06
    assert not any(">>>" in m["content"] for d in documents for m in d.messages)


def test_paragraphs_keep_prose_and_drop_code_tables_and_markup() -> None:
    text = """Return the *first* item of `things`, which
        is the \u201csmallest\u201d.

        >>> first([1, 2])
        1

        target ::= identifier

        +----+----+
        | a  | b  |

        - It is an error for the list to be empty.
        """
    kept = [
        'Return the first item of things, which is the "smallest".',
        "It is an error for the list to be empty.",
    ]
    assert demo_corpus.paragraphs(text) == kept


def test_windows_hold_whole_batches_of_one_length(small_corpus: list[Document]) -> None:
    documents = [encode(d) for d in small_corpus]
    for rows in itertools.islice(demo_corpus.windows(documents, 4096, seed=1), 50):
        assert len({len(row) for row in rows}) == 1 and len(rows) * len(rows[0]) == 4096
    with pytest.raises(ValueError, match="smaller than one batch"):
        next(demo_corpus.windows(documents[:2], 4096, seed=1))
