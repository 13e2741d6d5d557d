"""What `serve.preloaded` is, but for servers: its copies print what they were given."""

import os
import socket
import sys
import time

from setproctitle import getproctitle

from ellm_sgl.serve.preloaded import copies

getproctitle()
if (argv := copies(socket.socket(fileno=int(sys.argv[1])))) is not None:
    print(argv, os.environ.get("ELLM_SGL_X"), os.getcwd(), sys.argv[1:], flush=True)
    time.sleep(float(argv[0]))
    sys.exit(int(argv[1]))
