"""Pictures are gymnasium's own and those of the published benchmark, pixel by pixel; nothing opens a
window.
"""

import random
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from environments.vsp.benchmark import load_benchmark
from environments.vsp.maps import random_map
from environments.vsp.prompts import map_of
from environments.vsp.render import Renderer

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT.parent / "shared" / "vsp_sample"


@pytest.mark.parametrize("size", range(3, 10))
def test_kept_cells_draw_what_a_fresh_environment_draws(size):
    rng, renderer = random.Random(size), Renderer()
    for _ in range(10):
        grid = random_map(rng, size, 0.3)
        picture = renderer.render(grid)
        env = FrozenLakeEnv(desc=list(grid.rows), render_mode="rgb_array", is_slippery=False)
        env.reset(seed=0)
        assert np.array_equal(picture.rgb, env.render())
        assert picture.rgb.shape == (min(64 * size, 512), min(64 * size, 512), 3)


def test_the_same_map_gives_the_same_bytes_whatever_was_drawn_before():
    rng = random.Random(1)
    grids = [random_map(rng, size, 0.2) for size in (4, 8, 4, 9)]
    forward, backward = Renderer(), Renderer()
    one = [forward.render(grid).png for grid in grids]
    other = [backward.render(grid).png for grid in reversed(grids)]
    assert one == other[::-1]


@pytest.mark.skipif(not SAMPLE.is_dir(), reason=f"published samples are not at {SAMPLE}")
def test_a_renderer_keeps_cells_and_not_the_pictures_they_were_cut_from():
    """A worker that draws thousands of maps in 96 looks would grow by 20 MB for each look."""
    renderer, rng = Renderer(), random.Random(0)
    renderer.render(random_map(rng, 8, 0.2))  # imports gymnasium, which is not counted
    tracemalloc.start()
    try:
        for _ in range(100):
            renderer.render(random_map(rng, 8, 0.2))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 4 * 2**20  # four kinds of cell at 64 places of 4 KiB are 1 MiB


def test_pictures_equal_the_published_ones():
    """Fails with gymnasium 1.4, which drew FrozenLake anew: a policy would be tested on pictures it never
    saw.
    """
    renderer = Renderer()
    for prompt in load_benchmark(SAMPLE):
        assert np.array_equal(renderer.render(map_of(prompt)).rgb, prompt.pictures[0].rgb), prompt.prompt_id


def test_importing_the_environment_starts_nothing_and_sets_no_variable():
    code = (
        "import os, sys, cv2; before = dict(os.environ); "  # OpenCV sets one of its own
        "import environments.vsp.prompts, environments.vsp.benchmark; "
        "assert dict(os.environ) == before and 'pygame' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_process_that_has_drawn_still_ends_on_sigterm():
    code = (
        "import os, random, signal, time; from environments.vsp.maps import random_map; "
        "from environments.vsp.render import Renderer; "
        "Renderer().render(random_map(random.Random(0), 4, 0.2)); "
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT)
    assert result.returncode == -signal.SIGTERM
