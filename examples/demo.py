"""The whole story in one command: a healthy run beside its forecast, then a faulted one that stops at its flag.

python examples/demo.py                 # about four minutes on two cores
python examples/demo.py --fault data    # another fault in the second run: lr (default), data or nan
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

TRAIN = Path(__file__).resolve().parent / "train_lightning.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=("lr", "data", "nan"), default="lr")
    args = parser.parse_args()
    started = time.monotonic()
    for title, fault in (("A healthy run", "none"), (f"The same run with a fault: {args.fault}", args.fault)):
        print(f"\n=== {title} ===\n", flush=True)
        # A process each, so that nothing of the first run is left in the second.
        subprocess.run([sys.executable, str(TRAIN), "--fault", fault], check=True)
    print(f"\nBoth runs took {(time.monotonic() - started) / 60:.1f} minutes. See them: tensorboard --logdir runs")


if __name__ == "__main__":
    main()
