from pathlib import Path

import pytest
import torch

from tacit.errors import ConfigError
from tacit_lab import recipes
from tacit_lab.recipes import Choices, hyperparameters, models
from tacit_lab.recipes import digits as digits_module
from tacit_lab.recipes.data import cifar10, download
from tacit_lab.recipes.hyperparameters import TUNINGS, triangle


def test_a_recipes_name_says_what_decides_its_numbers(pictures: Path) -> None:
    small = Choices(data=pictures, model="resnet8", limit=700, precision="bf16")
    assert recipes.get("cifar10", small).name == "cifar10 (resnet8, small.tar, 700 images, bf16)"
    assert recipes.get("mnist", Choices(data=pictures)).name == "mnist (lenet, small.tar)"


def test_choices_come_back_out_of_the_words_of_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import argparse

    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    Choices.add_to(parser)
    chosen = Choices(model="vit", data=Path("data.tar"), limit=10, precision="bf16")
    back = Choices.of(parser.parse_args(chosen.words()))
    assert back == Choices(model="vit", data=tmp_path / "data.tar", limit=10, precision="bf16")
    assert Choices.of(parser.parse_args(Choices().words())) == Choices()


@pytest.mark.parametrize(
    ("name", "choices", "message"),
    [
        (
            "bytes",
            Choices(model="vit"),
            r"--model would do nothing for bytes: leave it out, or train cifar10 and digits and",
        ),
        ("bytes", Choices(data=Path("x")), "--data would do nothing for bytes"),
        ("cifar10", Choices(model="resnet-20"), r"unknown model 'resnet-20'. Did you mean 'resnet20'"),
        ("cifar10", Choices(precision="fp16"), r"unknown precision 'fp16'. Did you mean"),
        ("cifar10", Choices(limit=0), r"--limit 0 must be 1 or more"),
    ],
)
def test_what_cannot_be_chosen_is_refused_before_data_is_read(
    name: str, choices: Choices, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        recipes.get(name, choices)


@pytest.mark.parametrize("name", ["cifar10", "mnist"])
def test_without_data_the_error_says_where_it_can_be_had(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path))
    recipe = recipes.get(name)
    assert recipe.model(0) is not None
    with pytest.raises(
        ConfigError, match=r"write --data PATH for .*http.*; or --download to fetch that \(1.* MB\)"
    ):
        recipe.steps_per_epoch(1)


def test_what_was_downloaded_before_is_found(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path))
    monkeypatch.setattr(download, "fetched", lambda name: pictures)
    assert recipes.get("cifar10").steps_per_epoch(4) == 11


def test_fetching_is_for_recipes_that_have_something_to_fetch() -> None:
    with pytest.raises(
        ConfigError, match="--download would do nothing for digits: leave it out, or train cifar10"
    ):
        recipes.fetch("digits", print)


def test_a_limit_takes_the_first_images(pictures: Path) -> None:
    few = recipes.get("cifar10", Choices(data=pictures, limit=256))
    assert few.steps_per_epoch(2) == 4
    targets = torch.cat([y for rank in (0, 1) for _, y in few.train_batches(0, rank, 2, 0)])
    assert sorted(targets.tolist()) == sorted(i % 10 for i in range(256))
    with pytest.raises(
        ConfigError, match=r"--limit 1501 is more than the 1500 training images of .*small.tar"
    ):
        recipes.get("cifar10", Choices(data=pictures, limit=1501)).steps_per_epoch(1)


def test_pixels_are_normalized_and_channels_last(pictures: Path, digits: Path) -> None:
    for name, data, channels in (("cifar10", pictures, 3), ("mnist", digits, 1)):
        images, targets = next(recipes.get(name, Choices(data=data)).train_batches(0, 0, 1, 0))
        assert images.shape == (32, channels, 32, 32)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert (images.dtype, targets.dtype) == (torch.float32, torch.int64)
    # A pixel of 0 becomes -mean / deviation; MNIST's images have a black frame of two pixels.
    frame = torch.cat([images[:, :, :2].flatten(), images[:, :, :, 30:].flatten()])
    assert frame == pytest.approx(-0.1307 / 0.3081, abs=1e-5)


def test_enlarged_digits_are_those_of_the_recipe_without_a_model() -> None:
    pytest.importorskip("sklearn")
    large = recipes.get("digits", Choices(model="resnet8"))
    assert large.name == "digits (resnet8, digits.csv.gz)"
    assert large.steps_per_epoch(4) == 11
    assert any(isinstance(layer, torch.nn.BatchNorm2d) for layer in large.model(0).modules())
    images, targets = large._images.test
    assert (images.shape, images.min(), images.max()) == ((357, 1, 32, 32), 0, 255)
    held_out = digits_module._data()
    assert torch.equal(targets, held_out.test_targets)
    mean = torch.nn.functional.avg_pool2d(images.float(), 4)
    together = torch.corrcoef(torch.stack([mean.flatten(), held_out.test_images.flatten()]))
    assert together[0, 1] > 0.95
    pixels = torch.cat([x for x, _ in large.train_batches(0, 0, 1, 0)])
    assert pixels.mean() == pytest.approx(0, abs=0.01)
    assert pixels.std() == pytest.approx(1, abs=0.01)


def test_the_ranks_share_what_is_held_out(pictures: Path) -> None:
    recipe = recipes.get("cifar10", Choices(data=pictures, model="resnet8"))
    model = recipe.model(0)
    whole = recipe.evaluate(model)
    shares = torch.tensor([recipe.evaluate(model, rank, 4) for rank in range(4)])
    assert shares.mean(0).tolist() == pytest.approx(whole, abs=1e-5)
    assert shares[:, 0].unique().numel() == 4
    assert model.training


def test_evaluating_does_not_move_the_statistics_of_batches(pictures: Path) -> None:
    recipe = recipes.get("cifar10", Choices(data=pictures, model="resnet8"))
    model = recipe.model(0)
    before = [buffer.clone() for buffer in model.buffers()]
    assert recipe.evaluate(model) == recipe.evaluate(model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


@pytest.mark.parametrize("name", [name for name in models.known() if name != "vgg11"])  # its half minute
def test_every_network_learns_colours(name: str, pictures: Path) -> None:
    recipe = recipes.get("cifar10", Choices(data=pictures, model=name))
    model = recipe.model(0)
    optimizer = recipe.optimizer(model)
    losses = []
    steps = 30
    for step, (images, targets) in zip(range(steps), recipe.train_batches(0, 0, 1, 0), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = TUNINGS[name].lr * recipe.rate((step + 0.5) / steps)
        optimizer.zero_grad()
        loss = recipe.loss(model(images), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


def test_the_rate_rises_and_falls() -> None:
    points = [triangle(i / 100) for i in range(101)]
    peak = points.index(1.0)
    assert peak == 100 * hyperparameters.PEAK
    assert points[0] == points[-1] == 0
    assert points[:peak] == sorted(points[:peak])
    assert points[peak:] == sorted(points[peak:], reverse=True)


def test_every_network_has_a_tuning() -> None:
    assert sorted(TUNINGS) == models.known()


def test_a_small_binary_form_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from image_files import as_archive, batches

    monkeypatch.setattr(cifar10, "IMAGES", 20)
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))
    recipe = recipes.get("cifar10", Choices(data=as_archive(tmp_path / "c.tar.gz", batches(20))))
    assert recipe.steps_per_epoch(1) == 3
    assert len(list(recipe.train_batches(0, 0, 1, 0))) == 3
