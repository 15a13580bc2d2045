"""The pictures under docs/images are what the trees of docs/make_images.py look like now."""

import pytest

from docs.make_images import IMAGES, make_images


@pytest.fixture(scope="module")
def images() -> dict[str, str]:
    return make_images()


@pytest.mark.parametrize(
    "name",
    [
        "small_tree.svg",
        "large_tree.svg",
        "deep_tree.svg",
        "textbook_splits.svg",
        "textbook_requests.svg",
        "textbook_requests.html",
        "pins_and_tails.svg",
        "partial_pages.svg",
        "same_question.svg",
        "leaves_first.svg",
    ],
)
def test_kept_pictures_are_up_to_date(name: str, images: dict[str, str]):
    kept = (IMAGES / name).read_text(encoding="utf-8")
    assert kept == images[name], (
        "the drawing changed: run `python docs/make_images.py`, look at the pictures, commit them"
    )


def test_no_picture_is_missing_or_left_over(images: dict[str, str]):
    assert {path.name for path in IMAGES.iterdir()} == set(images)
