//! Writes log lines to their output on a separate thread.
//!
//! A stalled disk, a full pipe or a stopped terminal blocks that thread only. No other thread waits
//! for it: if the queue is full, lines are dropped and counted.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use tracing_subscriber::fmt::MakeWriter;

/// Most lines that wait to be written.
const WAITING: usize = 4096;

#[derive(Clone)]
pub(super) struct LogLines {
    sender: SyncSender<Message>,
    lost: Arc<AtomicU64>,
}

enum Message {
    Line {
        text: Vec<u8>,
        /// Number of lines dropped before this one.
        lost: u64,
    },
    Flush(SyncSender<()>),
    /// Makes this the output of all later lines.
    Output(Box<dyn Write + Send>),
}

impl LogLines {
    /// Writes to `output`; `lost_line` formats the line with the number of dropped lines.
    pub(super) fn to(
        output: impl Write + Send + 'static,
        lost_line: fn(u64) -> String,
    ) -> std::io::Result<Self> {
        let (sender, messages) = sync_channel(WAITING);
        std::thread::Builder::new()
            .name("log".into())
            .spawn(move || write(messages, Box::new(output), lost_line))?;
        Ok(Self {
            sender,
            lost: Arc::default(),
        })
    }

    fn put(&self, text: Vec<u8>) {
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if self.sender.try_send(Message::Line { text, lost }).is_err() {
            self.lost.fetch_add(lost + 1, Ordering::Relaxed);
        }
    }

    /// Writes later lines to another output. False if the queue stays full for `patience`.
    pub(super) fn replace(&self, output: Box<dyn Write + Send>, patience: Duration) -> bool {
        self.send(Message::Output(output), Instant::now() + patience)
    }

    fn send(&self, mut message: Message, end: Instant) -> bool {
        while let Err(TrySendError::Full(back)) = self.sender.try_send(message) {
            if Instant::now() >= end {
                return false;
            }
            message = back;
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }

    /// Waits until the lines so far are written, at most for `patience`.
    pub(super) fn flush(&self, patience: Duration) {
        let end = Instant::now() + patience;
        let (done, is_done) = sync_channel(1);
        if !self.send(Message::Flush(done), end) {
            return;
        }
        // A timeout or a dead thread cannot be reported here.
        let _ = is_done.recv_timeout(end.saturating_duration_since(Instant::now()));
    }
}

fn write(
    messages: Receiver<Message>,
    mut output: Box<dyn Write + Send>,
    lost_line: fn(u64) -> String,
) {
    for message in messages {
        // Continue after a write error: the output may accept the next line.
        match message {
            Message::Line { text, lost } => {
                if lost > 0 {
                    let _ = writeln!(output, "{}", lost_line(lost));
                }
                let _ = output.write_all(&text);
            }
            Message::Output(new) => {
                let _ = output.flush();
                output = new;
            }
            Message::Flush(done) => {
                let _ = output.flush();
                let _ = done.try_send(());
            }
        }
    }
}

impl<'a> MakeWriter<'a> for LogLines {
    type Writer = LogLine<'a>;

    fn make_writer(&'a self) -> LogLine<'a> {
        LogLine {
            text: Vec::new(),
            lines: self,
        }
    }
}

/// One line, queued when it is complete.
pub(super) struct LogLine<'a> {
    text: Vec<u8>,
    lines: &'a LogLines,
}

impl Write for LogLine<'_> {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.text.extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for LogLine<'_> {
    fn drop(&mut self) {
        if !self.text.is_empty() {
            self.lines.put(std::mem::take(&mut self.text));
        }
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use std::sync::mpsc::Sender;

    use super::*;

    /// An output that accepts nothing until its gate opens.
    struct Stuck {
        /// Notified when there is a line to write.
        came: Sender<()>,
        gate: Arc<Mutex<()>>,
        to: Sender<Vec<u8>>,
    }

    impl Write for Stuck {
        fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
            let _ = self.came.send(());
            drop(self.gate.lock());
            let _ = self.to.send(text.to_vec());
            Ok(text.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// Goal: logging threads never wait for the output. Lines that fit into the queue are written
    /// in order, and dropped ones are reported. Method: a stuck output while more lines are logged
    /// than fit.
    #[test]
    fn a_stuck_output_delays_no_logging_thread() {
        const EXCESS: usize = 100;
        let gate = Arc::new(Mutex::new(()));
        let (to, written) = std::sync::mpsc::channel();
        let (came, is_there) = std::sync::mpsc::channel();
        let stuck = Stuck {
            came,
            gate: Arc::clone(&gate),
            to,
        };
        let lines = LogLines::to(stuck, |lost| format!("{lost} lost")).unwrap();
        let log = |text: String| lines.make_writer().write_all(text.as_bytes()).unwrap();
        let closed = gate.lock();
        log("0\n".into());
        // The thread holds this line, so the queue gets no free slot during the loop.
        is_there.recv_timeout(Duration::from_secs(60)).unwrap();
        for line in 1..=WAITING + EXCESS {
            log(format!("{line}\n"));
        }
        lines.flush(Duration::ZERO);
        drop(closed);
        lines.flush(Duration::from_secs(60));
        log("last\n".into());
        lines.flush(Duration::from_secs(60));
        let all: Vec<u8> = written.try_iter().flatten().collect();
        let all = String::from_utf8(all).unwrap();
        let all: Vec<&str> = all.lines().collect();
        let (lost_line, numbers) = (all[all.len() - 2], &all[..all.len() - 2]);
        assert_eq!(all.last(), Some(&"last"));
        assert!(
            numbers
                .iter()
                .enumerate()
                .all(|(n, text)| *text == n.to_string())
        );
        assert_eq!(numbers.len(), WAITING + 1);
        assert_eq!(lost_line, format!("{EXCESS} lost"));
    }
}
