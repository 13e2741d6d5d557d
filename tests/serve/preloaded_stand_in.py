"""What `serve.preloaded` is, but for servers: its copies print what they were given."""

import os
import socket
import sys
import time

from setproctitle import getproctitle

from ellm_sgl.serve.preloaded import copies_of_two

kind = ["stock"]
getproctitle()
stock, elastic = (socket.socket(fileno=int(each)) for each in sys.argv[1:])
if (argv := copies_of_two(stock, elastic, lambda: kind.append("eLLM"))) is not None:
    print(argv, os.environ.get("ELLM_SGL_X"), os.getcwd(), sys.argv[1:], kind[-1], flush=True)
    time.sleep(float(argv[0]))
    sys.exit(int(argv[1]))
