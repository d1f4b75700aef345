import torch
from torch import Tensor
from torch.nn.functional import pad

from tacit_lab.recipes.data.augment import crop_and_flip, noise


def images(count: int) -> Tensor:
    return torch.randint(
        1, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def ways(image: Tensor) -> dict[bytes, tuple[int, int, bool]]:
    """Every way to move and mirror an image."""
    padded = pad(image, (4, 4, 4, 4))
    crops = {(y, x): padded[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)}
    return {
        (crop.flip(2) if mirrored else crop).contiguous().numpy().tobytes(): (y, x, mirrored)
        for (y, x), crop in crops.items()
        for mirrored in (False, True)
    }


def test_every_image_is_moved_and_half_of_them_mirrored() -> None:
    given = images(1).expand(400, -1, -1, -1).contiguous()
    before = given.clone()
    got = crop_and_flip(given, noise(0, 0, 0))
    assert got.shape == given.shape
    assert got.dtype == torch.uint8
    assert torch.equal(given, before)
    known = ways(given[0])
    seen = [known[image.contiguous().numpy().tobytes()] for image in got]  # a KeyError: no such way
    for axis in (0, 1):
        assert {way[axis] for way in seen} == set(range(9))
    assert 140 < sum(way[2] for way in seen) < 260  # 200 of 400, six deviations of 10


def test_colours_move_together_and_images_apart() -> None:
    got = crop_and_flip(images(20), noise(0, 0, 0))
    for i, image in enumerate(images(20)):
        assert got[i].contiguous().numpy().tobytes() in ways(image)


def test_other_seeds_epochs_and_ranks_draw_others() -> None:
    def drawn(*where: int) -> Tensor:
        return crop_and_flip(images(8), noise(*where))

    assert torch.equal(drawn(1, 2, 3), drawn(1, 2, 3))
    for other in ((0, 2, 3), (1, 0, 3), (1, 2, 0), (2, 1, 3), (12, 3, 3)):
        assert not torch.equal(drawn(1, 2, 3), drawn(*other)), other


def test_torchs_own_generator_stays_as_it_was() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    crop_and_flip(images(2), noise(0, 0, 0))
    assert torch.equal(torch.rand(1), expected)
