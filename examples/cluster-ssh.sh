#!/bin/bash
# examples/cluster.yaml on machines that ssh reaches, without a scheduler: a line for each in the file `hosts`
# ("host-a slots=8"), the same folder on all of them. Started again after a lost rank, as examples/cluster.sbatch does; the
# words with keepalive make mpirun notice a machine that is gone.
#   examples/cluster-ssh.sh 64 [--set KEY=VALUE]...
ranks=${1:?number of ranks}
shift
export PATH=$PWD/build/cuda/src/cli:$PATH
restarts=0
until mpirun -n "$ranks" --hostfile hosts --map-by ppr:8:node --bind-to none -x PATH -x LD_LIBRARY_PATH \
  --mca oob_tcp_keepalive_time 5 --mca oob_tcp_keepalive_intvl 3 --mca oob_tcp_keepalive_probes 5 \
  sparsebalance train examples/cluster.yaml "$@"; do
  code=$?
  if { [ $code -ne 1 ] && [ $code -lt 128 ]; } || [ $((restarts += 1)) -gt 20 ]; then exit $code; fi
  pause=$((restarts < 6 ? 5 << restarts : 300))
  echo "a rank was lost (exit code $code): starting again in $pause s, restart $restarts of 20"
  sleep $pause
done
