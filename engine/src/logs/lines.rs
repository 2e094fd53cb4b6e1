//! Where log lines go: to standard error, by a thread of its own.
//!
//! A stalled disk, a full pipe or a stopped terminal blocks a thread that writes to it. No core may
//! wait for that, as all of its hosts would. Lines that find the queue full are dropped and counted.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use tracing_subscriber::fmt::MakeWriter;

/// Lines that wait at most.
const WAITING: usize = 4096;

#[derive(Clone)]
pub(super) struct Lines {
    sender: SyncSender<Message>,
    lost: Arc<AtomicU64>,
}

enum Message {
    Line {
        text: Vec<u8>,
        /// Lines before it that were left out.
        lost: u64,
    },
    Flush(SyncSender<()>),
    /// Where the lines go from here on.
    Output(Box<dyn Write + Send>),
}

impl Lines {
    /// `lost_line` makes the line that has the number of dropped lines.
    pub fn to(
        output: impl Write + Send + 'static,
        lost_line: fn(u64) -> String,
    ) -> std::io::Result<Lines> {
        let (sender, messages) = sync_channel(WAITING);
        std::thread::Builder::new()
            .name("log".into())
            .spawn(move || write(messages, Box::new(output), lost_line))?;
        Ok(Lines {
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

    /// Sends the lines that come after this elsewhere. False if the queue stays full for
    /// `patience`.
    pub fn replace(&self, output: Box<dyn Write + Send>, patience: Duration) -> bool {
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

    /// Waits until the lines so far are written, but for no longer than `patience`.
    pub fn flush(&self, patience: Duration) {
        let end = Instant::now() + patience;
        let (done, is_done) = sync_channel(1);
        if !self.send(Message::Flush(done), end) {
            return;
        }
        // Too late, or its thread is gone: there is nobody to tell.
        let _ = is_done.recv_timeout(end.saturating_duration_since(Instant::now()));
    }
}

fn write(
    messages: Receiver<Message>,
    mut output: Box<dyn Write + Send>,
    lost_line: fn(u64) -> String,
) {
    for message in messages {
        // An output that refuses lines is no reason to end: it may take the next.
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

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line {
            text: Vec::new(),
            lines: self,
        }
    }
}

/// One line, which leaves when it is whole.
pub(super) struct Line<'a> {
    text: Vec<u8>,
    lines: &'a Lines,
}

impl Write for Line<'_> {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.text.extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for Line<'_> {
    fn drop(&mut self) {
        if !self.text.is_empty() {
            self.lines.put(std::mem::take(&mut self.text));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::Sender;

    use super::*;

    /// An output that takes nothing before its gate opens.
    struct Stuck {
        /// Told when there is something for it.
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

    /// Goal: who logs never waits for the output, the lines that there is room for are written in their order, and where
    /// others are missing it says so. Method: an output that is stuck while more is logged than may wait.
    #[test]
    fn nobody_waits_for_an_output_that_is_stuck() {
        const EXCESS: usize = 100;
        let gate = Arc::new(Mutex::new(()));
        let (to, written) = std::sync::mpsc::channel();
        let (came, is_there) = std::sync::mpsc::channel();
        let stuck = Stuck {
            came,
            gate: Arc::clone(&gate),
            to,
        };
        let lines = Lines::to(stuck, |lost| format!("{lost} lost")).unwrap();
        let log = |text: String| lines.make_writer().write_all(text.as_bytes()).unwrap();
        let closed = gate.lock().unwrap();
        log("0\n".into());
        // The thread has it in its hands: it makes no room for another one while the others come.
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
