"""Measures how much of a book a model has memorized, window by window.

    python -m levanter.main.eval_careless_lm --config_path config/memorization/demo.yaml

A window is a prefix that is given and a suffix that is scored: p_z is the probability that the model, sampling under
a decoding scheme, continues the prefix with exactly that suffix. One pass gives it for every scheme. What happens, in
order: the run is described and checked (text, tokenizer, model, mesh, batch, every parameter's place); folders are
inspected, so that a finished book is left alone and an unfinished one resumes; the weights are streamed into their
final shards; the windows are scored; tables, pictures and a report are written.
"""

from levanter.commands.cli.runner import run_config
from levanter.commands.memorize.config import Book, EvalCarelessLmConfig, resolve_books
from levanter.commands.memorize.plan import BookJob, MemorizationWork, OpenJob, describe_jobs
from levanter.commands.memorize.run import execute_jobs, finish, outputs
from levanter.config import ExplicitKeys
from levanter.data import Tokenizer
from levanter.io.paths import MissingFileError, is_remote
from levanter.memorization.books import BookText, TextError, read_book, windows_identity
from levanter.memorization.conventions import preset_name
from levanter.memorization.results import Scheme
from levanter.memorization.windows import build_windows
from levanter.runplan import Check, EntryPoint, RunPlan, Target

NAME = "eval_careless_lm"


def describe(
    config: EvalCarelessLmConfig, target: Target, *, written: ExplicitKeys | None = None
) -> RunPlan[MemorizationWork]:
    """Describes the run for `target`; reads metadata and the texts, no weights."""
    checks: list[Check] = []
    jobs = []
    for book in resolve_books(config):
        text, text_checks = _read(book)
        checks += text_checks
        jobs.append(_job(config, book, text))
    return describe_jobs(
        config,
        target,
        jobs,
        entry_point=NAME,
        checks=checks,
        schemes=[Scheme.parse(name) for name in config.schemes] + [job.scheme for job in jobs],
        tokenizer=config.tokenizer_name,
        written=ExplicitKeys.in_python(config) if written is None else written,
    )


def _read(book: Book) -> tuple[BookText | None, list[Check]]:
    try:
        text = read_book(book.path)
    except TextError as error:
        return None, [Check(name="text", status="error", message=f"{book.title}: {error}", error=error)]
    except (ValueError, OSError) as error:
        # Absent or unreachable text is needed by a run, not by a plan. Other errors are raised at once.
        if not isinstance(error, MissingFileError) and not is_remote(book.path):
            raise
        missing = MissingFileError(str(error))
        return None, [Check(name="text", status="unchecked", message=f"{book.title}: {error}", error=missing)]
    message = f"{book.title}: {len(text.text):,} characters, {book.path}"
    notes = [Check(name="text", status="note", message=f"{book.title}: {note}") for note in text.notes]
    return text, [Check(name="text", status="ok", message=message), *notes]


def _job(config: EvalCarelessLmConfig, book: Book, text: BookText | None) -> BookJob:
    convention = book.convention
    windowing = convention.windowing
    windows, reason = _count(config, book, text)

    # Called during a run, in another thread: tokenizing a book takes minutes.
    def opened(tokenizer: Tokenizer) -> OpenJob:
        assert text is not None, "RunPlan.check() comes before a run"
        windows = build_windows(text.text, tokenizer, windowing, max_windows=book.max_windows)
        return OpenJob(
            source=windows,
            # Positions of every window in tokens and characters; reports need them to map p_z to the text.
            spans={
                "token_spans": windows.token_spans,
                "char_spans": windows.char_spans,
                "suffix_char_spans": windows.suffix_char_spans,
            },
            facts={"duplicate_windows_dropped": windows.duplicates},
        )

    # One window is enough to find a prefix that is too long, or a tokenizer without BOS, before weights are read.
    def checked(tokenizer: Tokenizer) -> None:
        assert text is not None, "RunPlan.check() comes before a run"
        build_windows(text.text, tokenizer, windowing, max_windows=1)

    return BookJob(
        key=book.key,
        title=book.title,
        folder=book.folder,
        preset=preset_name(convention),
        scheme=convention.scheme,
        positions=windowing.window_tokens,
        suffix_tokens=windowing.suffix_tokens,
        bos=windowing.bos,
        batch_size=book.batch_size,
        windows=windows,
        windows_reason=reason,
        # Results of another text or other windows are never continued.
        identity={} if text is None else windows_identity(text, convention, max_windows=book.max_windows),
        text=text.text if text is not None and config.keep_text else None,
        check=checked,
        open=opened,
        output_names=book.names,
    )


def _count(config: EvalCarelessLmConfig, book: Book, text: BookText | None) -> tuple[int | None, str]:
    """The number of windows, as far as it is known without tokenizing the book, and its source."""
    windowing, assumed = book.convention.windowing, config.plan.assume_tokens
    if text is not None:
        # The text is not tokenized here, so the count is an estimate from its characters.
        count = windowing.count_in_text(len(text.text))
        reason = f"about {count:,} windows in {len(text.text):,} characters"
    elif assumed is not None:
        count = windowing.count(assumed)
        reason = f"{count:,} windows in {assumed:,} tokens (plan.assume_tokens)"
    else:
        return None, "the text is not available here; set plan.assume_tokens to the number of tokens to plan for"
    # `max_examples` is an upper limit; fewer windows make it irrelevant.
    if book.max_windows is not None and book.max_windows < count:
        return book.max_windows, f"the first {book.max_windows:,} windows (max_examples)"
    return count, reason


execute = execute_jobs

ENTRY_POINT = EntryPoint(
    name=NAME,
    config=EvalCarelessLmConfig,
    describe=describe,
    execute=execute_jobs,
    outputs=outputs,
    finish=finish,
)


def main(config: EvalCarelessLmConfig, *, written: ExplicitKeys | None = None) -> int:
    """Runs the evaluation on the devices of this run."""
    return run_config(ENTRY_POINT, config, written=written).exit_code
