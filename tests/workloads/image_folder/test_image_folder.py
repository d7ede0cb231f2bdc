"""Folders of images as people have them, made here file by file."""

from __future__ import annotations

import math
import os
import shutil
import struct
import zlib
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from torch_parallel.workloads import DataError, load_dataset
from torch_parallel.workloads.image_folder import load, load_image_folder
from torch_parallel.workloads.image_folder.listing import list_images
from torch_parallel.workloads.image_folder.split import groups_of_equals
from torch_parallel.workloads.load import Choice, load_workload


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.delenv("TORCH_PARALLEL_DATA", raising=False)


def plain(colour: tuple[int, ...] | int, size: tuple[int, int] = (8, 8)) -> Image.Image:
    return Image.new("L" if isinstance(colour, int) else "RGB", size, colour)


def make(folder: Path, counts: dict[str, int], ending: str = "png") -> Path:
    """Images of 8 x 8 pixels, each of a colour of its own: (class, number, 7)."""
    for index, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            plain((index, number, 7)).save(folder / name / f"{number:03}.{ending}")
    return folder


def colours(inputs: torch.Tensor) -> set[tuple[int, ...]]:
    """Of images of one colour each."""
    assert bool((inputs == inputs[:, :, :1, :1]).all())
    return {tuple(image[:, 0, 0].tolist()) for image in inputs}


def test_a_split_is_drawn_class_by_class(tmp_path: Path) -> None:
    folder = make(tmp_path / "flowers", {"tulip": 20, "Rose": 5, "anemone": 1})
    dataset, line = load_image_folder(folder, 8, seed=0)
    assert dataset.name == "flowers" and dataset.class_count == 3
    # "Rose" < "anemone" < "tulip"; a tenth of 20 and at least one of 5; the only one of a class is trained on
    assert torch.bincount(dataset.train_targets).tolist() == [4, 1, 18]
    assert torch.bincount(dataset.test_targets, minlength=3).tolist() == [1, 0, 2]
    train, test = colours(dataset.train_inputs), colours(dataset.test_inputs)
    assert not train & test and len(train) == 23 and len(test) == 3
    made = {0: "tulip", 1: "Rose", 2: "anemone"}
    for inputs, targets in ((dataset.train_inputs, dataset.train_targets), (dataset.test_inputs, dataset.test_targets)):
        names = [made[int(image[0, 0, 0])] for image in inputs]
        assert names == [sorted(made.values())[target] for target in targets.tolist()]
    assert "3 classes; 3 of 26 images drawn for testing; 26 images decoded to 3 x 8 x 8 in" in line
    assert line.startswith(f"flowers from {folder} (") and "\n" not in line


def test_the_split_is_of_the_seed_alone(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", {"x": 30, "y": 30})
    copy = tmp_path / "b"
    for name in sorted((each.relative_to(folder) for each in folder.glob("*/*")), reverse=True):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / name, copy / name)  # in another order of the directory
    runs = ((folder, 1), (copy, 1), (folder, 2))
    first, again, other = (load_image_folder(place, 8, seed)[0] for place, seed in runs)
    assert torch.equal(first.test_inputs, again.test_inputs) and torch.equal(first.train_inputs, again.train_inputs)
    assert colours(first.test_inputs) != colours(other.test_inputs)


@pytest.mark.parametrize("test_name", ["test", "val", "VAL"])
def test_parts_that_are_there_are_taken(test_name: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make(folder / "train", {"a": 3, "b": 2})
    make(folder / test_name, {"a": 2, "b": 1})
    (folder / "readme.txt").write_text("about")
    dataset, line = load_dataset(str(folder), None, None, seed=0, side=8)
    assert dataset.train_targets.tolist() == [0, 0, 0, 1, 1] and dataset.test_targets.tolist() == [0, 0, 1]
    assert "1 other file or folder beside not used" in line
    assert "test images that are in the training part too: 3" in line  # the same colours, so the same bytes


def test_other_sizes_are_fitted_to_the_shorter_side_and_the_centre_kept(tmp_path: Path) -> None:
    """16 x 8 pixels of columns 0, 10, ..., 150 to 8 x 8: the middle columns 40..110 as they are."""
    folder = make(tmp_path / "wide", {"a": 2, "b": 2})
    columns = numpy.arange(16, dtype=numpy.uint8) * 10
    Image.fromarray(numpy.tile(columns, (8, 1))).convert("RGB").save(folder / "a" / "z.png")
    plain((9, 8, 7), (31, 200)).save(folder / "b" / "z.png")
    dataset, _ = load_image_folder(folder, 8, seed=0)
    images = torch.cat((dataset.train_inputs, dataset.test_inputs))
    wide = [image for image in images if not bool((image == image[:, :1, :1]).all())]
    assert len(wide) == 1 and wide[0].tolist() == [[[40, 50, 60, 70, 80, 90, 100, 110]] * 8] * 3
    assert load_image_folder(folder, None, seed=0)[0].image_shape == (3, 64, 64)


def image_of(tmp_path: Path, name: str, content: Image.Image | bytes, **options: object) -> torch.Tensor:
    """What becomes of one file, [c, 8, 8], beside others that are grey."""
    folder = tmp_path / name.replace(".", "_")
    for each in ("a", "b"):
        (folder / each).mkdir(parents=True)
        for number in range(2):
            plain(100 + number).save(folder / each / f"{number}.png")
    file = folder / "b" / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        content.save(file, **options)
    dataset, _ = load_image_folder(folder, 8, seed=0)
    images = torch.cat((dataset.train_inputs, dataset.test_inputs))
    found = [image for image in images if tuple(image.flatten()[:1].tolist()) not in ((100,), (101,))]
    assert len(found) == 1
    return found[0]


def test_kinds_of_pixels(tmp_path: Path) -> None:
    """All grey is one channel; a single one of colour makes three. Values by hand."""
    assert image_of(tmp_path, "grey.png", plain(7)).unique(dim=1).flatten()[:1].tolist() == [7]
    assert image_of(tmp_path, "grey.bmp", plain(7)).shape == (1, 8, 8)
    assert image_of(tmp_path, "bits.png", Image.new("1", (8, 8), 1)).flatten().unique().tolist() == [255]
    deep = Image.fromarray(numpy.full((8, 8), 0xABCD, dtype=numpy.uint16))
    assert image_of(tmp_path, "deep.png", deep).flatten().unique().tolist() == [0xAB]
    with_alpha = Image.new("LA", (8, 8), (9, 0))
    assert image_of(tmp_path, "alpha.png", with_alpha).flatten().unique().tolist() == [9]
    palette = plain((1, 2, 3)).convert("P", palette=Image.Palette.ADAPTIVE)
    assert image_of(tmp_path, "palette.PNG", palette)[:, 0, 0].tolist() == [1, 2, 3]
    palette.info["transparency"] = bytes([0, 255])
    assert image_of(tmp_path, "transparent.png", palette, transparency=b"\x00\xff")[:, 0, 0].tolist() == [1, 2, 3]
    assert image_of(tmp_path, "rgba.webp", Image.new("RGBA", (8, 8), (4, 5, 6, 255)), lossless=True).shape == (3, 8, 8)
    assert image_of(tmp_path, "cmyk.TIFF", Image.new("CMYK", (8, 8), (255, 0, 0, 0)))[:, 0, 0].tolist() == [0, 255, 255]
    assert image_of(tmp_path, "a photo, ürgend.JPEG", plain((250, 2, 2)))[0, 0, 0] >= 245


def test_images_are_turned_as_their_exif_says(tmp_path: Path) -> None:
    """Orientation 6: the camera was turned, so the stored left column is the top row."""
    stored = numpy.zeros((8, 8, 3), dtype=numpy.uint8)
    stored[:, 0] = (200, 50, 5)
    exif = Image.Exif()
    exif[0x0112] = 6
    image = image_of(tmp_path, "turned.png", Image.fromarray(stored), exif=exif)
    assert image[:, 0].tolist() == [[200] * 8, [50] * 8, [5] * 8] and int(image[:, 1:].sum()) == 0


def test_what_lies_about_is_passed_over_and_links_are_followed(tmp_path: Path) -> None:
    folder = make(tmp_path / "with spaces", {"猫": 4, "perro ñ": 4}, "JPG")
    (folder / ".DS_Store").write_bytes(b"x")
    (folder / "猫" / "Thumbs.db").write_bytes(b"x")
    (folder / "猫" / "._001.jpg").write_bytes(b"x")
    (folder / "__MACOSX").mkdir()
    (folder / ".ipynb_checkpoints").mkdir()
    elsewhere = make(tmp_path / "elsewhere", {"more": 3})
    (folder / "猫" / "more").symlink_to(elsewhere / "more")
    (folder / "猫" / "loop").symlink_to(folder / "猫")
    plain((77, 77, 0)).save(tmp_path / "one.png")
    (folder / "perro ñ" / "linked").symlink_to(tmp_path / "one.png")
    dataset, line = load_image_folder(folder, 8, seed=0)
    counts = torch.bincount(torch.cat((dataset.train_targets, dataset.test_targets)))
    assert counts.tolist() == [5, 7] and "beside" not in line  # "perro" before "猫"


def test_files_of_the_same_bytes_stay_on_one_side(tmp_path: Path) -> None:
    folder = make(tmp_path / "twins", {"a": 10, "b": 10})
    for number in range(10):
        for copy in range(3):
            shutil.copy(folder / "a" / f"{number:03}.png", folder / "a" / f"copy {number} {copy}.png")
    shutil.copy(folder / "a" / "004.png", folder / "b" / "also.png")
    for seed in range(5):
        dataset, line = load_image_folder(folder, 8, seed)
        assert not colours(dataset.train_inputs) & colours(dataset.test_inputs)
        assert len(dataset.train_targets) + len(dataset.test_targets) == 51
        assert int((dataset.test_targets == 0).sum()) in (4, 5)
        assert "files that are copies of others, on the same side: 31; images in several classes: 1" in line


def test_groups_of_equals(tmp_path: Path) -> None:
    for name, content in {"a": b"12", "b": b"21", "c": b"12", "d": b"123"}.items():
        (tmp_path / name).write_bytes(content)
    assert groups_of_equals([tmp_path / name for name in "abcd"]) == [[0, 2], [1], [3]]


def test_mean_and_deviation_are_those_of_the_training_part(tmp_path: Path) -> None:
    folder = tmp_path / "levels"
    for part, levels in {"train": {"a": 0, "b": 255}, "test": {"a": 7, "b": 9}}.items():
        for name, level in levels.items():
            (folder / part / name).mkdir(parents=True)
            plain((level, 51, 102)).save(folder / part / name / "1.png")
    dataset, _ = load_image_folder(folder, 8, seed=0)
    assert dataset.mean == (0.5, 0.2, 0.4) and dataset.std == (0.5, 1.0, 1.0)  # one colour alone has no deviation
    torch.manual_seed(0)
    images = torch.randint(0, 256, (300, 2, 5, 4), dtype=torch.uint8)
    mean, std = load.mean_and_deviation(images)
    pixels = images.double().transpose(0, 1).flatten(1) / 255
    assert mean == tuple(round(each, 4) for each in pixels.mean(1).tolist())
    assert std == tuple(round(each, 4) for each in pixels.std(1, correction=0).tolist())


def test_only_the_samples_that_are_wanted_are_decoded(tmp_path: Path) -> None:
    folder = make(tmp_path / "many", {"a": 40, "b": 40})
    (folder / "a" / "005.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"005\.png is no image that Pillow can open; remove it from its class"):
        load_image_folder(folder, 8, seed=3)
    whole = sorted(folder.glob("*/*.png"))
    for seed in range(10):
        try:
            dataset, line = load_dataset(str(folder), None, 6, seed, 2, side=8)
        except DataError:
            continue
        assert (len(dataset.train_inputs), len(dataset.test_inputs)) == (6, 2) and len(whole) == 80
        assert line.endswith("; 6 of 72 training samples; 2 of 8 test samples")
        return
    raise AssertionError("never left out")


def test_sizes_that_are_too_large(tmp_path: Path) -> None:
    folder = make(tmp_path / "few", {"a": 4, "b": 4})
    with pytest.raises(DataError, match=r"train_size is 7, but few has 6 train samples"):
        load_image_folder(folder, 8, seed=0, train_size=7)


def test_memory_is_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 images of 3 x 100 x 100 take 180,000 bytes, 175.8 KiB."""
    folder = make(tmp_path / "large", {"a": 3, "b": 3})
    monkeypatch.setattr(load, "free_memory_bytes", lambda: 1024 * 100)
    monkeypatch.setattr(load, "decode", lambda *_: pytest.fail("it was decoded"))
    said = r"^large: 6 images of 3 x 100 x 100 take 175\.8 KiB of memory, and 100 KiB are free; take fewer \(--train_si"
    with pytest.raises(DataError, match=said):
        load_image_folder(folder, 100, seed=0)


def truncated(folder: Path) -> Path:
    file = folder / "a" / "000.jpg"
    Image.effect_noise((64, 64), 90).save(file)
    file.write_bytes(file.read_bytes()[:700])
    return file


def bomb(folder: Path) -> Path:
    """A PNG that says it has 2^32 pixels."""
    file = folder / "a" / "000.png"
    header = b"IHDR" + struct.pack(">IIBBBBB", 65536, 65536, 8, 2, 0, 0, 0)
    chunks = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)) + struct.pack(">I", 9) + b"IDAT"
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
    return file


def of_32_bits(folder: Path) -> Path:
    file = folder / "a" / "000.tif"
    Image.new("F", (8, 8), 0.5).save(file)
    return file


def text(folder: Path) -> Path:
    file = folder / "b" / "notes.txt"
    file.write_text("these are roses")
    return file


def dead_link(folder: Path) -> Path:
    file = folder / "a" / "gone.png"
    file.symlink_to(folder / "nothing")
    return file


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "a" / "pipe")
    return folder / "a" / "pipe"


def empty_file(folder: Path) -> Path:
    (folder / "a" / "empty.png").touch()
    return folder / "a" / "empty.png"


def empty_class(folder: Path) -> Path:
    (folder / "c").mkdir()
    (folder / "c" / ".DS_Store").touch()
    return folder / "c"


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (truncated, r"is damaged, or of an unusual kind \(.*truncated.*\); remove it, or save it anew"),
        (bomb, "is damaged, or of an unusual kind .*exceeds limit"),
        (of_32_bits, "is damaged, or of an unusual kind .*32 bits"),
        (text, "is no image that Pillow can open"),
        (empty_file, "is no image that Pillow can open"),
        (dead_link, "is a link to nothing, and no image; remove it"),
        (fifo, "is no file, and no image; remove it"),
        (empty_class, "has no image, and is a class; put its images there, or remove the folder"),
    ],
)
def test_a_file_that_is_wrong_is_named(break_it: object, said: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "broken", {"a": 3, "b": 3})
    wrong = break_it(folder)  # type: ignore[operator]
    before = sorted(folder.rglob("*"))
    with pytest.raises(DataError, match=said) as error:
        load_image_folder(folder, 8, seed=0)
    assert str(error.value).startswith(f"{wrong} ") and "\n" not in str(error.value)
    assert sorted(folder.rglob("*")) == before


def test_folders_that_are_none(tmp_path: Path) -> None:
    for name, said in {
        "empty": r"empty has no sub-folder; one sub-folder a class is wanted",
        "one": r"one has one class only, a; two classes at least",
        "nested": r"nested has one class only, flowers; .*; if its sub-folders are the classes, give .*nested/flowers$",
        "trained": r"trained has train/, and no folder for testing; give .*trained/train, of which a tenth",
        "unlike": r"unlike/test has no folder b, and train/ has one; both parts must have the same classes",
        "more": r"more/train has no folder c, and test/ has one",
        "single": r"single has one image a class, and none is left for testing",
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        if name == "one":
            make(folder, {"a": 3})
        if name == "nested":
            make(folder / "flowers", {"a": 3, "b": 3})
        if name == "trained":
            make(folder / "train", {"a": 3, "b": 3})
        if name in ("unlike", "more"):
            make(folder / "train", {"a": 1, "b": 1})
            make(folder / "test", {"a": 1} | ({"b": 1, "c": 1} if name == "more" else {}))
        if name == "single":
            make(folder, {"a": 1, "b": 1})
        with pytest.raises(DataError, match=said) as error:
            load_image_folder(folder, 8, seed=0)
        assert "\n" not in str(error.value)


def test_a_name_is_looked_for_below_the_data_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data of all"
    make(data / "flowers", {"a": 3, "b": 3})
    make(data / "digits", {"a": 3, "b": 3})
    monkeypatch.setenv("TORCH_PARALLEL_DATA", str(data))
    assert load_dataset("flowers", None, None, 0, side=8)[0].image_shape == (3, 8, 8)
    assert load_dataset("digits", None, None, 0)[0].image_shape == (1, 8, 8)  # a name of ours is ours
    assert load_dataset(str(data / "digits"), None, None, 0, side=8)[0].image_shape == (3, 8, 8)
    (data / "flowers.zip").touch()
    with pytest.raises(DataError, match=r"--dataset flowers\.zip: .* is a file; for images a folder is wanted"):
        load_dataset("flowers.zip", None, None, 0)
    with pytest.raises(DataError, match=r"there is no data set 'weeds'; choose from .* or give the path of a folder"):
        load_dataset("weeds", None, None, 0)
    with pytest.raises(DataError, match="there is no data set ''"):
        load_dataset("", None, None, 0)


@pytest.mark.parametrize("model", ["bert", "gpt2"])
def test_models_of_text_take_no_folder_of_images(model: str, tmp_path: Path) -> None:
    make(tmp_path / "flowers", {"a": 3, "b": 3})
    for name, data_dir in ((str(tmp_path / "flowers"), None), ("flowers", str(tmp_path))):
        with pytest.raises(DataError, match=rf"flowers is a folder, and {model} takes texts: .* for images"):
            load_workload(Choice(model, name, data_dir, model_size="tiny"))


def test_large_classes_are_counted_right(tmp_path: Path) -> None:
    """A tenth, rounded, of each class."""
    dataset, _ = load_image_folder(make(tmp_path / "x", {"a": 24, "b": 26}), 8, seed=0)
    assert torch.bincount(dataset.test_targets).tolist() == [round(2.4), round(2.6)]
    assert math.isclose(len(dataset.train_targets), 45)


def test_parts_by_other_usual_names_are_no_classes(tmp_path: Path) -> None:
    make(tmp_path / "kaggle" / "Training", {"a": 4, "b": 4})
    make(tmp_path / "kaggle" / "Testing", {"a": 2, "b": 2})
    listing = list_images(tmp_path / "kaggle")
    assert listing.classes == ("a", "b") and listing.test is not None
    assert (len(listing.train), len(listing.test)) == (8, 4)
    make(tmp_path / "no_train" / "test", {"a": 2, "b": 2})
    make(tmp_path / "no_train" / "val", {"a": 2, "b": 2})
    with pytest.raises(DataError, match="has test/, val/, and none of them is train/; name the part for training so"):
        list_images(tmp_path / "no_train")
