"""Starting JAX: fake CPU devices, the compile cache, the mesh."""

import jax
from jax.sharding import Mesh

from jaxlm.core.errors import CommandError
from jaxlm.data import cache
from jaxlm.parallel import mesh
from jaxlm.parallel.config import MeshConfig


def start(cpu_devices: int | None = None) -> None:
    """Settles what must be settled before JAX looks for devices.

    `cpu_devices` splits this machine's CPU into that many devices, to try a mesh without owning one. Compiled programs
    are kept in the cache folder, so the second start of a run does not compile again.

    Raises:
      CommandError: where JAX has started with another number of devices.
    """
    if cpu_devices is not None:
        try:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", cpu_devices)
        except RuntimeError as error:
            raise CommandError(
                "the number of CPU devices cannot change once JAX has started",
                where=f"--cpu_devices={cpu_devices}",
                why=str(error),
                fix="name it in the first command of the process",
            ) from error
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update(
            "jax_compilation_cache_dir",
            str(cache.folder(cache.default(), "compiled", jax=jax.__version__)),
        )


def build_mesh(config: MeshConfig) -> Mesh:
    """The mesh over all devices. Raises ConfigError where it does not fit them."""
    return mesh.build(config)
