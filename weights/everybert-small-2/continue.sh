#!/usr/bin/env bash
# continue.sh PROJECT W TASKS: the second run of everybert-small 2, then its scores and adapters, in parallel.
# After W/released exists, W/int8 is the model. No fine-tuning starts later than MINUTES after that.
PROJECT=$1; W=$2; TASKS=$3; MINUTES=${MINUTES:-4}
export PYTHONPATH=$PROJECT/src OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
RUN="python3 $PROJECT/recipes/everybert_small.py"
mkdir -p $W/logs
OMP_NUM_THREADS=4 $RUN pretrain --work $W --text $W/part-0.txt $W/part-1.txt $W/part-2.txt --everyday $W/part-3.txt \
  > $W/logs/pretrain 2>&1 || exit 1
python3 - $PROJECT $W <<'P'
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1] + "/recipes")
import everybert_small
work = Path(sys.argv[2])
everybert_small.release(work / "run/model", work / "int8", True)
everybert_small.release(work / "run/model", work / "fp32")
P
touch $W/released
GIVEN="--work $W --tasks $TASKS --minutes $MINUTES"
full() { log=$1; shift; $RUN scores $GIVEN --modes full "$@" >> $W/logs/$log 2>&1; }
lora() { log=$1; shift; $RUN adapters $GIVEN "$@" >> $W/logs/$log 2>&1; }
# A step of so small a model takes as long with 64 texts as with 32: the large sets have batches of 64.
for seed in 0 1 2; do
  full sst$seed --only SST-2 --seeds 1 --first-seed $seed --set lr=2e-4 --set evaluations=4 --set batch_size=64 &
  lora sentiment$seed --only sentiment --seeds 1 --first-seed $seed --set lr=7e-4 --set evaluations=4 --set batch_size=64 &
done
full cola --only CoLA --set lr=2e-4 --set epochs=8 &
full mrpc --only MRPC --set lr=4e-4 &
full rte --only RTE+nli --set lr=1e-4 --set epochs=6 &
{ full sts --only STS-B --set lr=4e-4; full sts --only UPOS --set lr=2e-4; } &
full squad --only SQuAD+cloze --set lr=4e-4 &
lora accept --only acceptability --set lr=5e-4 --set epochs=12 &
{ lora qa --only qa --seeds 1 --set rank=12 --set lr=1e-3 --set epochs=8; $RUN polish $GIVEN >> $W/logs/qa 2>&1; } &
{ lora pairs --only paraphrase --set lr=1e-3; lora pairs --only similarity --seeds 1 --set lr=5e-4; } &
{ lora tags --only pos --seeds 1 --set lr=5e-4; lora tags --only ner --seeds 1 --set lr=5e-4; } &
lora entailment --only entailment --seeds 1 --set lr=5e-4 --set batch_size=64 &
{ $RUN quantize $GIVEN >> $W/logs/quantize 2>&1; $RUN curve $GIVEN >> $W/logs/curve 2>&1; } &
wait
